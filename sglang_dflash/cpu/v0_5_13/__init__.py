"""SGLang 0.5.13.post1, whose CPU engine computes with its own compiled ops."""
