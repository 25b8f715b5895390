"""K norm, RoPE and the scatter of context K/V into every draft layer's pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Pools:
    """The draft's KV pools: `layers` tensors [slots, heads, D] of one dtype, contiguous."""

    k: list[Tensor]
    v: list[Tensor]
    addresses: Tensor  # [2, layers] int64 on the pools' device, K then V

    @classmethod
    def of(cls, k: list[Tensor], v: list[Tensor]) -> Pools:
        assert all(pool.is_contiguous() and pool.dtype == k[0].dtype for pool in k + v)
        addresses = [[pool.data_ptr() for pool in pools] for pools in (k, v)]
        return cls(k, v, torch.tensor(addresses, dtype=torch.int64, device=k[0].device))


def launch_store_kv(
    kv: Tensor, norm_weight: Tensor, eps: float, cos_sin: Tensor, slots: Tensor, pools: Pools
) -> None:
    """Finish the projected K/V of all draft layers and write them.

    kv: [n, L, 2, heads, D], K then V, of the pools' dtype; norm_weight: [L, D]; cos_sin:
    [n, L or 1, D], cosines then sines (rotate-half RoPE); slots: [n] int64, 0 (SGLang's dummy slot)
    for tokens that are not written. Norm and RoPE compute in float32. Each rounds its result, as
    SGLang's kernels do in the draft's own forward. One program per token, layer and head.
    """
    tokens, layers, _, heads, dim = kv.shape
    assert kv.dtype == pools.k[0].dtype
    _store_kv[(tokens, layers, heads)](
        kv.contiguous(),
        norm_weight,
        eps,
        cos_sin.contiguous(),
        slots,
        pools.addresses,
        ropes=cos_sin.shape[1],
        heads=heads,
        dim=dim,
        padded=triton.next_power_of_2(dim // 2),
    )


def store_kv_in_torch(
    kv: Tensor, norm_weight: Tensor, eps: float, cos_sin: Tensor, slots: Tensor, pools: Pools
) -> None:
    """The reference of `launch_store_kv`. It writes the dummy slot, which nobody reads."""
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


# Triton takes annotations other than tl.constexpr for globals, and refuses them.
@triton.jit
def _store_kv(  # type: ignore[no-untyped-def]
    kv,  # [n, L, 2, heads, D]
    norm_weight,  # [L, D]
    eps,
    cos_sin,  # [n, ropes, D]
    slots,  # [n] int64
    addresses,  # [2, L] int64
    ropes,
    heads: tl.constexpr,
    dim: tl.constexpr,
    padded: tl.constexpr,
):
    token, layer, head = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    layers = tl.num_programs(1)
    dtype = kv.dtype.element_ty
    half = tl.arange(0, padded)
    mask = half < dim // 2
    src = kv + ((token * layers + layer) * 2 * heads + head) * dim + half
    slot = tl.load(slots + token)
    if slot == 0:
        return
    dst = slot * heads * dim + head * dim + half

    first = tl.load(src, mask, 0.0).to(tl.float32)
    second = tl.load(src + dim // 2, mask, 0.0).to(tl.float32)
    scale = tl.rsqrt((tl.sum(first * first) + tl.sum(second * second)) / dim + eps)
    weight = norm_weight + layer * dim + half
    first = (first * scale * tl.load(weight, mask, 0.0).to(tl.float32)).to(dtype).to(tl.float32)
    second *= scale * tl.load(weight + dim // 2, mask, 0.0).to(tl.float32)
    second = second.to(dtype).to(tl.float32)
    rope = cos_sin + (token * ropes + tl.minimum(layer, ropes - 1)) * dim + half
    cos = tl.load(rope, mask, 0.0).to(tl.float32)
    sin = tl.load(rope + dim // 2, mask, 0.0).to(tl.float32)
    k_pool = tl.load(addresses + layer).to(tl.pointer_type(dtype))
    tl.store(k_pool + dst, (first * cos - second * sin).to(dtype), mask)
    tl.store(k_pool + dst + dim // 2, (second * cos + first * sin).to(dtype), mask)

    v_pool = tl.load(addresses + layers + layer).to(tl.pointer_type(dtype))
    values = src + heads * dim
    tl.store(v_pool + dst, tl.load(values, mask), mask)
    tl.store(v_pool + dst + dim // 2, tl.load(values + dim // 2, mask), mask)
