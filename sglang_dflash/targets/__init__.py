"""Kinds of targets: hybrids, LoRA, KV in FP8, KV in host memory."""
