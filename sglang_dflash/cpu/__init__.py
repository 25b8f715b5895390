"""What lets SGLang 0.5.13.post1 run without a GPU, with any speculative algorithm or none."""
