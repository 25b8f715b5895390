"""K norm, RoPE and the scatter of context K/V into every draft layer's pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.cpu.context_kv import store_in_torch


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


def store_context_kv(
    kv: Tensor,
    norm_weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    slots: Tensor,
    pools: Pools,
    num_accepted: Tensor | None = None,
) -> None:
    """Finish projected K/V of all layers and write them.

    kv: [n, L, 2, heads, D], K then V, the pools' dtype; norm_weight: [L, D]; cos_sin: [n, L or 1,
    D], cos then sin (rotate-half RoPE); slots: [n] int64, 0 where nothing need be written (SGLang's
    dummy slot); num_accepted: [B] int64, where the rows are blocks of B requests, of which the
    anchor and these drafts are written, None: all rows. Norm and RoPE are float32 inside; each
    rounds its result, as SGLang's kernels in the draft's own forward do.
    """
    write = launch_store if kv.is_cuda else store_in_torch
    write(kv, norm_weight, eps, cos_sin, slots, pools, num_accepted)


def launch_store(
    kv: Tensor,
    norm_weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    slots: Tensor,
    pools: Pools,
    num_accepted: Tensor | None = None,
) -> None:
    """One program a token, layer and head; `cpu.context_kv.store_in_torch` is its twin."""
    n, layers, _, heads, dim = kv.shape
    assert kv.dtype == pools.k[0].dtype
    _store[(n, layers, heads)](
        kv.contiguous(),
        norm_weight,
        eps,
        cos_sin.contiguous(),
        slots,
        pools.addresses,
        num_accepted,
        stride=0 if num_accepted is None else num_accepted.stride(0),
        width=1 if num_accepted is None else n // len(num_accepted),
        ropes=cos_sin.shape[1],
        heads=heads,
        dim=dim,
        padded=triton.next_power_of_2(dim // 2),
    )


# Annotations other than tl.constexpr are taken for globals, which Triton refuses.
@triton.jit(do_not_specialize=["stride", "width"])
def _store(  # type: ignore[no-untyped-def]
    kv,  # [n, L, 2, heads, D]
    norm_weight,  # [L, D]
    eps,
    cos_sin,  # [n, ropes, D]
    slots,  # [n] int64
    addresses,  # [2, L] int64
    num_accepted,  # [n / width] int64 or None
    stride,  # of num_accepted
    width,  # rows a request
    ropes,
    heads: tl.constexpr,
    dim: tl.constexpr,
    padded: tl.constexpr,
):
    token, layer, head = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    layers = tl.num_programs(1)
    kind = kv.dtype.element_ty
    half = tl.arange(0, padded)
    real = half < dim // 2
    here = kv + ((token * layers + layer) * 2 * heads + head) * dim + half
    slot = tl.load(slots + token)
    if num_accepted is not None:
        request = token // width
        if token % width > tl.load(num_accepted + request * stride):
            slot = slot * 0  # a plain 0 has another type
    if slot == 0:
        return
    there = slot * heads * dim + head * dim + half

    first = tl.load(here, real, 0.0).to(tl.float32)
    second = tl.load(here + dim // 2, real, 0.0).to(tl.float32)
    scale = tl.rsqrt((tl.sum(first * first) + tl.sum(second * second)) / dim + eps)
    weight = norm_weight + layer * dim + half
    first = (first * scale * tl.load(weight, real, 0.0).to(tl.float32)).to(kind).to(tl.float32)
    second *= scale * tl.load(weight + dim // 2, real, 0.0).to(tl.float32)
    second = second.to(kind).to(tl.float32)
    rope = cos_sin + (token * ropes + tl.minimum(layer, ropes - 1)) * dim + half
    cos = tl.load(rope, real, 0.0).to(tl.float32)
    sin = tl.load(rope + dim // 2, real, 0.0).to(tl.float32)
    k_pool = tl.load(addresses + layer).to(tl.pointer_type(kind))
    tl.store(k_pool + there, (first * cos - second * sin).to(kind), real)
    tl.store(k_pool + there + dim // 2, (second * cos + first * sin).to(kind), real)

    v_pool = tl.load(addresses + layers + layer).to(tl.pointer_type(kind))
    values = here + heads * dim
    tl.store(v_pool + there, tl.load(values, real), real)
    tl.store(v_pool + there + dim // 2, tl.load(values + dim // 2, real), real)
