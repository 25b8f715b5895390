"""Acceptance in one launch: what the host reads, the next anchors and the next lengths."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.core.accept import Accepted, accept_in_torch


def accept_block(
    block: Tensor, target_ids: Tensor, seq_lens: Tensor, most: int, given: Tensor | None = None
) -> Accepted:
    """The rule of `core.accept`, or what is given, and what follows from it.

    block: [B, w] int64, rows contiguous, column 0 is the anchor; target_ids: [B, w] int64,
    contiguous; seq_lens: [B] int64, tokens before the anchor; most: the new lengths' bound; given:
    [B] int64 in 0..w-1, the number of drafts to accept, None: the rule's.
    """
    run = launch_accept if block.is_cuda else accept_in_torch
    return run(block, target_ids, seq_lens, most, given)


def launch_accept(
    block: Tensor, target_ids: Tensor, seq_lens: Tensor, most: int, given: Tensor | None = None
) -> Accepted:
    """One program a request; `core.accept.accept_in_torch` is its twin."""
    rows, width = target_ids.shape
    assert target_ids.is_contiguous()
    assert seq_lens.is_contiguous()
    assert block.stride(1) == 1
    packed = target_ids.new_empty(rows, width + 1)
    bonus, lens = target_ids.new_empty(rows), target_ids.new_empty(rows)
    _accept[(rows,)](
        block,
        target_ids,
        seq_lens,
        given,
        packed,
        bonus,
        lens,
        most,
        block.stride(0),
        width=width,
        padded=triton.next_power_of_2(width),
        num_warps=1,
    )
    return Accepted(packed, bonus, lens)


# Annotations other than tl.constexpr are taken for globals, which Triton refuses.
@triton.jit(do_not_specialize=["most", "stride"])
def _accept(  # type: ignore[no-untyped-def]
    block,  # [B, w] int64
    target_ids,  # [B, w] int64
    seq_lens,  # [B] int64
    given,  # [B] int64 or None
    packed,  # [B, w + 1] int64
    bonus,  # [B] int64
    lens,  # [B] int64
    most,
    stride,  # of a row of the block
    width: tl.constexpr,
    padded: tl.constexpr,
):
    row = tl.program_id(0)
    at = tl.arange(0, padded)
    drawn = tl.load(target_ids + row * width + at, at < width, 0)
    if given is None:
        draft = tl.load(block + row * stride + at + 1, at < width - 1, 0)
        ends = (draft != drawn) | (at >= width - 1)
        num_accepted = tl.min(tl.where(ends, at, padded)).to(tl.int64)
    else:
        num_accepted = tl.load(given + row)
    tl.store(packed + row * (width + 1) + at, drawn, at < width)
    tl.store(packed + row * (width + 1) + width, num_accepted)
    tl.store(bonus + row, tl.load(target_ids + row * width + num_accepted))
    tl.store(lens + row, tl.minimum(tl.load(seq_lens + row) + num_accepted + 1, most))
