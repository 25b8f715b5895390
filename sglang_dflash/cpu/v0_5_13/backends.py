"""The attention backend of a CPU."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.attention.attention_registry import attn_backend_wrapper

from sglang_dflash.cpu.attention import TorchAttention


def attention_backend(original: Any, runner: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """AROUND `ModelRunner._get_attention_backend_from_str`: `torch_native` is `TorchAttention`."""
    if name != "torch_native":
        return original(runner, name, *args, **kwargs)
    if runner.hybrid_gdn_config is None:
        return attn_backend_wrapper(runner, TorchAttention(runner))
    from sglang_dflash.cpu.v0_5_13.gated_delta_net import hybrid_attention  # imports Triton kernels

    return hybrid_attention(runner, TorchAttention(runner))
