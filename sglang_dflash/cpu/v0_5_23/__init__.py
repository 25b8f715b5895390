"""SGLang 0.5.23, to which a CPU is a platform that a plugin brings."""
