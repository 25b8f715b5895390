"""SGLang's CUDA attention backends, taught to serve blocks."""
