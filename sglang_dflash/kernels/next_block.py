"""The next block in one launch: its tokens, positions and slots."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class NextBlock(NamedTuple):
    """The anchor, then mask tokens (DFlash paper, section "drafting"). All [B, N] int64."""

    token_ids: Tensor  # column 0 is the anchor
    positions: Tensor
    slots: Tensor  # KV slots of these positions in the rows of the requests


def launch_next_block(
    anchors: Tensor,
    seq_lens: Tensor,
    rows: Tensor,
    table: Tensor,
    block_size: int,
    mask_token_id: int,
) -> NextBlock:
    """Make the block after each request's context.

    anchors, seq_lens, rows: [B] int64, contiguous; table: [R, C] int32, the slot of each position
    of a row, wide enough for the block. One program per request.
    """
    requests = len(anchors)
    assert table.stride(1) == 1
    assert all(tensor.is_contiguous() for tensor in (anchors, seq_lens, rows))
    block = NextBlock(*(anchors.new_empty(requests, block_size) for _ in NextBlock._fields))
    _next_block[(requests,)](
        anchors,
        seq_lens,
        rows,
        table,
        *block,
        table.stride(0),
        mask_token_id,
        size=block_size,
        padded=triton.next_power_of_2(block_size),
        num_warps=1,
    )
    return block


def next_block_in_torch(
    anchors: Tensor,
    seq_lens: Tensor,
    rows: Tensor,
    table: Tensor,
    block_size: int,
    mask_token_id: int,
) -> NextBlock:
    """The reference of `launch_next_block`."""
    positions = block_positions(seq_lens, block_size)
    token_ids = torch.full_like(positions, mask_token_id)
    token_ids[:, 0] = anchors
    slots = table[rows[:, None], positions].long()
    return NextBlock(token_ids, positions, slots)


def block_positions(seq_lens: Tensor, width: int) -> Tensor:
    """Absolute positions, [B, width] int64. seq_lens: [B] int64, tokens before the anchor."""
    return seq_lens[:, None] + torch.arange(width, device=seq_lens.device)


# Triton takes annotations other than tl.constexpr for globals, and refuses them.
@triton.jit
def _next_block(  # type: ignore[no-untyped-def]
    anchors,  # [B] int64
    seq_lens,  # [B] int64
    rows,  # [B] int64
    table,  # [R, C] int32
    token_ids,  # [B, N] int64
    positions,  # [B, N] int64
    slots,  # [B, N] int64
    table_stride,
    mask_token_id,
    size: tl.constexpr,
    padded: tl.constexpr,
):
    request = tl.program_id(0)
    column = tl.arange(0, padded)
    mask = column < size
    dst = request * size + column
    position = tl.load(seq_lens + request) + column
    token = tl.where(column == 0, tl.load(anchors + request), mask_token_id)
    slot = tl.load(table + tl.load(rows + request) * table_stride + position, mask, 0)
    tl.store(token_ids + dst, token, mask)
    tl.store(positions + dst, position, mask)
    tl.store(slots + dst, slot.to(tl.int64), mask)
