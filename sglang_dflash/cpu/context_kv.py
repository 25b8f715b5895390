"""The torch twin of the context KV kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sglang_dflash.kernels.context_kv import Pools


def store_in_torch(
    kv: Tensor,
    norm_weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    slots: Tensor,
    pools: Pools,
    num_accepted: Tensor | None = None,
) -> None:
    """What `kernels.context_kv.launch_store` does, which has the shapes."""
    if num_accepted is not None:
        at = torch.arange(len(slots) // len(num_accepted), device=slots.device)
        slots = slots.where((at <= num_accepted[:, None]).flatten(), 0)
    k, v = kv.unbind(2)  # [n, L, heads, D]
    k32 = k.float()
    k32 = k32 * torch.rsqrt(k32.pow(2).mean(-1, keepdim=True) + eps)
    k32 = (k32 * norm_weight[:, None].float()).to(k.dtype).float()
    cos, sin = cos_sin[:, :, None].float().chunk(2, dim=-1)  # [n, L or 1, 1, D/2]
    first, second = k32.chunk(2, dim=-1)
    k = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(k.dtype)
    for layer, (k_pool, v_pool) in enumerate(zip(pools.k, pools.v, strict=True)):
        k_pool[slots] = k[:, layer]
        v_pool[slots] = v[:, layer]
