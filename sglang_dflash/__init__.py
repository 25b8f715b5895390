"""DFlash speculative decoding for SGLang, as a plugin."""

__version__ = "0.1.0"
