"""Changes to SGLang's CUDA attention backends, so that they serve blocks."""
