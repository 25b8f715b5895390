"""Torch versions, for the CPU, of functions that SGLang has only as Triton or compiled code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sglang_dflash.method.noise import hash32


def no_kv_copy_kernel(pool: Any) -> None:
    """REPLACE `MHATokenToKVPool._init_kv_copy_and_warmup`: nothing moves KV on this path."""
    pool._kv_copy_config = None


def murmur_hash32(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """REPLACE SGLang's Triton kernel of the same name, bit for bit.

    seed, positions: [n] integers; col_indices: [m] integers. Returns [n, m] uint32.
    """
    seeds = seed.view(torch.int64)[:, None]
    return hash32(seeds, positions[:, None], col_indices).view(torch.uint32)


def skip_batch_invariant_mode() -> None:
    """REPLACE `enable_batch_invariant_mode`, which registers Triton kernels."""


def apply_vocab_mask(original: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND the grammars' `apply_vocab_mask(logits, vocab_mask)`, which has no CPU branch.

    logits: [n, V]; vocab_mask: [n, ceil(V / 32)] int32, bit i of word w allows token 32 w + i.
    """
    logits, mask = args[-2:] if len(args) >= 2 else (kwargs["logits"], kwargs["vocab_mask"])
    if logits.device.type != "cpu":
        original(*args, **kwargs)
        return
    bits = (mask[:, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
    logits.masked_fill_(bits.flatten(1)[:, : logits.shape[1]] == 0, float("-inf"))


class _Unpinned(TorchFunctionMode):
    """Torch functions make tensors in pageable memory, whatever they are asked for."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.pin_memory:
            return args[0]
        return func(*args, **{k: v for k, v in (kwargs or {}).items() if k != "pin_memory"})


def without_pinning(original: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND what LoRA and DP attention pin. To pin memory, torch needs a GPU's driver."""
    with _Unpinned():
        return original(*args, **kwargs)


def latent_handler(original: Any, registry: Any, name: str) -> Any:
    """AROUND `AttentionBackendRegistry.get_handler`, for targets with latent attention (MLA).

    SGLang has no handler of `torch_native` and takes that of Triton. It computes some prefills from
    the K and V of each head, but `TorchAttention` reads the pool, which holds latent vectors.
    """
    if name != "torch_native":
        return original(registry, name)
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    return lambda attention, forward_batch: AttnForwardMethod.MLA


def plain_rope(
    original: Any,
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: int,
    is_neox_style: bool = True,
    rope_scaling: dict[str, Any] | None = None,
    *args: Any,
) -> Any:
    """AROUND `get_rope_cpu`, which knows only DeepSeek's YaRN: plain RoPE as everywhere else."""
    from sglang.srt.layers.rotary_embedding import get_rope

    make = get_rope if rope_scaling is None else original
    shape = (head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling)
    return make(*shape, *(args[:2] if rope_scaling is None else args))
