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
    widths: Tensor | None = None,
) -> AcceptResult:
    """Apply the rule of `method.acceptance`, or accept a simulated number of drafts.

    block: [B, w] int64, column 0 is the anchor; target_ids: [B, w] int64, contiguous; slots:
    [B, w] int64, KV slots of the block; seq_lens: [B] int64, tokens before the anchor; max_len:
    upper bound of the new lengths; simulated: [B] int64, the number of drafts to accept as far as
    they are verified, or None for the rule; widths: [B] int64 in 1..w, the positions of each
    request that are verified, or None for all. Rows of `block` and `slots` are contiguous. One
    program per request.
    """
    requests, width = target_ids.shape
    assert target_ids.is_contiguous()
    assert seq_lens.is_contiguous()
    assert widths is None or widths.is_contiguous()
    assert block.stride(1) == slots.stride(1) == 1
    accepted = AcceptResult(
        packed=target_ids.new_empty(requests, width + 2),
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
        widths,
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
    widths: Tensor | None = None,
) -> AcceptResult:
    """The reference of `launch_accept`."""
    requests, width = target_ids.shape
    position = torch.arange(width, device=target_ids.device)
    if widths is None:
        widths = seq_lens.new_full((requests,), width)
    if simulated is None:
        # A draft that is not verified is no token, and so never the target's.
        num_accepted, bonus = accept(block.masked_fill(position >= widths[:, None], -1), target_ids)
    else:
        num_accepted = torch.minimum(simulated, widths - 1)
        bonus = target_ids.gather(1, num_accepted[:, None]).squeeze(1)
    rejected = position > num_accepted[:, None]  # [B, w]
    return AcceptResult(
        packed=torch.cat([target_ids, num_accepted[:, None], widths[:, None]], dim=1),
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
    widths,  # [B] int64 or None
    packed,  # [B, w + 2] int64
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
    last = width - 1  # the last position that is verified
    if widths is not None:
        last = (tl.load(widths + request) - 1).to(tl.int32)
    if simulated is None:
        draft = tl.load(block + request * block_stride + position + 1, position < last, 0)
        ends = (draft != target_id) | (position >= last)
        num_accepted = tl.min(tl.where(ends, position, padded)).to(tl.int64)
    else:
        num_accepted = tl.minimum(tl.load(simulated + request), last)
    outcome = packed + request * (width + 2)
    tl.store(outcome + position, target_id, mask)
    tl.store(outcome + width, num_accepted)
    tl.store(outcome + width + 1, last + 1)
    tl.store(bonus + request, tl.load(target_ids + request * width + num_accepted))
    tl.store(lens + request, tl.minimum(tl.load(seq_lens + request) + num_accepted + 1, max_len))
    slot = tl.load(slots + request * slots_stride + position, position <= num_accepted, 0)
    tl.store(kv_slots + request * width + position, slot, mask)
