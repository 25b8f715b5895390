"""SGLang's attention backends, taught to serve blocks."""
