"""SGLang 0.5.13.post1 without a GPU, with any speculative algorithm or none."""
