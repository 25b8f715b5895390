"""The next block in one launch: its tokens, positions and slots."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.core.block import Block, block_in_torch


def next_block(
    anchors: Tensor, seq_lens: Tensor, rows: Tensor, table: Tensor, at: Tensor, mask_token_id: int
) -> Block:
    """The block that the draft reads behind these contexts.

    anchors, seq_lens, rows: [B] int64, contiguous; table: [R, C] int32, slots of positions a row;
    at: [N] int64, 0..N-1; the kernel reads but its length. Positions lie within the table's rows.
    """
    run = launch_block if anchors.is_cuda else block_in_torch
    return run(anchors, seq_lens, rows, table, at, mask_token_id)


def launch_block(
    anchors: Tensor, seq_lens: Tensor, rows: Tensor, table: Tensor, at: Tensor, mask_token_id: int
) -> Block:
    """One program a request; `core.block.block_in_torch` is its twin."""
    count, size = len(anchors), len(at)
    assert table.stride(1) == 1
    assert all(tensor.is_contiguous() for tensor in (anchors, seq_lens, rows))
    block = Block(*(anchors.new_empty(count, size) for _ in Block._fields))
    _next_block[(count,)](
        anchors,
        seq_lens,
        rows,
        table,
        *block,
        table.stride(0),
        mask_token_id,
        size=size,
        padded=triton.next_power_of_2(size),
        num_warps=1,
    )
    return block


# Annotations other than tl.constexpr are taken for globals, which Triton refuses.
@triton.jit
def _next_block(  # type: ignore[no-untyped-def]
    anchors,  # [B] int64
    seq_lens,  # [B] int64
    rows,  # [B] int64
    table,  # [R, C] int32
    token_ids,  # [B, N] int64
    positions,  # [B, N] int64
    slots,  # [B, N] int64
    stride,  # of a row of the table
    mask_token_id,
    size: tl.constexpr,
    padded: tl.constexpr,
):
    request = tl.program_id(0)
    at = tl.arange(0, padded)
    real, there = at < size, request * size + at
    position = tl.load(seq_lens + request) + at
    token = tl.where(at == 0, tl.load(anchors + request), mask_token_id)
    slot = tl.load(table + tl.load(rows + request) * stride + position, real, 0)
    tl.store(token_ids + there, token, real)
    tl.store(positions + there, position, real)
    tl.store(slots + there, slot.to(tl.int64), real)
