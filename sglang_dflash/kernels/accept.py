"""Acceptance in one launch: the copy for the host, the next anchors, lengths and KV slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.method.acceptance import AcceptResult, accept


def launch_accept(
    block: Tensor,
    target_ids: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    max_len: int,
    simulated: Tensor | None = None,
) -> AcceptResult:
    """Apply the rule of `method.acceptance`, or accept a simulated number of drafts.

    block: [B, w] int64, column 0 is the anchor; target_ids: [B, w] int64, contiguous; slots:
    [B, w] int64, KV slots of the block; seq_lens: [B] int64, tokens before the anchor; max_len:
    upper bound of the new lengths; simulated: [B] int64 in 0..w-1, the number of drafts to accept,
    or None for the rule. Rows of `block` and `slots` are contiguous. One program per request.
    """
    requests, width = target_ids.shape
    assert target_ids.is_contiguous()
    assert seq_lens.is_contiguous()
    assert block.stride(1) == slots.stride(1) == 1
    accepted = AcceptResult(
        packed=target_ids.new_empty(requests, width + 1),
        bonus=target_ids.new_empty(requests),
        lens=target_ids.new_empty(requests),
        kv_slots=target_ids.new_empty(requests, width),
    )
    _accept[(requests,)](
        block,
        target_ids,
        slots,
        seq_lens,
        simulated,
        *accepted,
        max_len,
        block.stride(0),
        slots.stride(0),
        width=width,
        padded=triton.next_power_of_2(width),
        num_warps=1,
    )
    return accepted


def accept_in_torch(
    block: Tensor,
    target_ids: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    max_len: int,
    simulated: Tensor | None = None,
) -> AcceptResult:
    """The reference of `launch_accept`."""
    if simulated is None:
        num_accepted, bonus = accept(block, target_ids)
    else:
        num_accepted = simulated
        bonus = target_ids.gather(1, simulated[:, None]).squeeze(1)
    position = torch.arange(target_ids.shape[1], device=target_ids.device)
    rejected = position > num_accepted[:, None]  # [B, w]
    return AcceptResult(
        packed=torch.cat([target_ids, num_accepted[:, None]], dim=1),
        bonus=bonus,
        lens=(seq_lens + num_accepted + 1).clamp(max=max_len),
        kv_slots=slots.masked_fill(rejected, 0),
    )


# Triton takes annotations other than tl.constexpr for globals, and refuses them.
@triton.jit(do_not_specialize=["max_len", "block_stride", "slots_stride"])
def _accept(  # type: ignore[no-untyped-def]
    block,  # [B, w] int64
    target_ids,  # [B, w] int64
    slots,  # [B, w] int64
    seq_lens,  # [B] int64
    simulated,  # [B] int64 or None
    packed,  # [B, w + 1] int64
    bonus,  # [B] int64
    lens,  # [B] int64
    kv_slots,  # [B, w] int64
    max_len,
    block_stride,
    slots_stride,
    width: tl.constexpr,
    padded: tl.constexpr,
):
    request = tl.program_id(0)
    position = tl.arange(0, padded)
    mask = position < width
    target_id = tl.load(target_ids + request * width + position, mask, 0)
    if simulated is None:
        draft = tl.load(block + request * block_stride + position + 1, position < width - 1, 0)
        ends = (draft != target_id) | (position >= width - 1)
        num_accepted = tl.min(tl.where(ends, position, padded)).to(tl.int64)
    else:
        num_accepted = tl.load(simulated + request)
    tl.store(packed + request * (width + 1) + position, target_id, mask)
    tl.store(packed + request * (width + 1) + width, num_accepted)
    tl.store(bonus + request, tl.load(target_ids + request * width + num_accepted))
    tl.store(lens + request, tl.minimum(tl.load(seq_lens + request) + num_accepted + 1, max_len))
    slot = tl.load(slots + request * slots_stride + position, position <= num_accepted, 0)
    tl.store(kv_slots + request * width + position, slot, mask)
