"""The command `sglang-dflash`."""
