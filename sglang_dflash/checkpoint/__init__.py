"""Draft checkpoints: detect the format, read it correctly or refuse it by name."""

from sglang_dflash.checkpoint.detect import FORMATS, load, load_config, rename_weights

__all__ = ["FORMATS", "load", "load_config", "rename_weights"]
