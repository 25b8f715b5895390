"""Measures DFLASH against no speculation and against SGLang's built-in. See docs/benchmarks.md."""
