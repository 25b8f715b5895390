"""Draft checkpoints: detect the format, read it correctly or refuse it by name."""

from sglang_dflash.checkpoint.detect import FORMATS, load_config, read_draft, rename_weights

__all__ = ["FORMATS", "load_config", "read_draft", "rename_weights"]
