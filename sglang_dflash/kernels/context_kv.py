"""K norm, RoPE and the scatter of context K/V into every draft layer's pool."""

from __future__ import annotations

import torch
from torch import Tensor


def store_context_kv(
    kv: Tensor,
    norm_weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    slots: Tensor,
    k_pools: list[Tensor],
    v_pools: list[Tensor],
) -> None:
    """Finish projected K/V of all layers and write them.

    kv: [n, L, 2, heads, D], K then V; norm_weight: [L, D]; cos_sin: [n, L or 1, D], cos then sin
    (rotate-half RoPE); slots: [n] int64; pools: L tensors [slots, heads, D]. Rounding follows the
    draft's own forward: norm in float32, rounded, then RoPE.
    """
    k, v = kv.unbind(2)  # [n, L, heads, D]
    k32 = k.float()
    k32 = k32 * torch.rsqrt(k32.pow(2).mean(-1, keepdim=True) + eps)
    k = (k32 * norm_weight[:, None].float()).to(k.dtype)
    cos, sin = cos_sin[:, :, None].to(k.dtype).chunk(2, dim=-1)  # [n, L or 1, 1, D/2]
    first, second = k.chunk(2, dim=-1)
    k = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    for layer, (k_pool, v_pool) in enumerate(zip(k_pools, v_pools, strict=True)):
        k_pool[slots] = k[:, layer].to(k_pool.dtype)
        v_pool[slots] = v[:, layer].to(v_pool.dtype)
