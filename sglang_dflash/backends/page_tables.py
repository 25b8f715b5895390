"""The page table and the KV length of each request, for paged attention, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 16  # per request: a graph's launch is sized before lengths are known
COLUMNS = 1024  # of a page table, at once


def fill_tables(
    table: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    width: int,
    page_size: int,
    lens: Tensor,
    pages: Tensor,
    widths: Tensor | None = None,
    starts: Tensor | None = None,
) -> None:
    """Fill in the KV lengths, the block included, and the pages of these tokens.

    table: [R, C] int32, the slot of each position of a row; rows: [B] int64 and seq_lens: [B] int32
    or int64, both contiguous; width: tokens of a block; lens: [B] int32, output; pages: [B, P]
    int32, output. For each request, the pages of its tokens are filled, at most P. widths: [>= B]
    int32, the tokens of each request's block, if they differ; then starts, [B + 1] int32, gets
    their sums.
    """
    assert table.stride(1) == pages.stride(1) == 1
    assert all(tensor.is_contiguous() for tensor in (rows, seq_lens, lens))
    _fill_tables[(len(rows), PROGRAMS)](
        table,
        rows,
        seq_lens,
        lens,
        pages,
        widths,
        starts,
        table.stride(0),
        pages.stride(0),
        pages.shape[1],
        width,
        page_size=page_size,
        columns=COLUMNS,
        padded=triton.next_power_of_2(len(rows)),
    )


# Triton takes annotations other than tl.constexpr for globals, and refuses them.
@triton.jit(do_not_specialize=["width"])
def _fill_tables(  # type: ignore[no-untyped-def]
    table,  # [R, C] int32
    rows,  # [B] int64
    seq_lens,  # [B] int32 or int64
    lens,  # [B] int32
    pages,  # [B, P] int32
    widths,  # [B] int32 or None
    starts,  # [B + 1] int32
    stride,  # of a row of the table
    pages_stride,  # of a row of the pages
    most,  # P
    width,
    page_size: tl.constexpr,
    columns: tl.constexpr,
    padded: tl.constexpr,
):
    request = tl.program_id(0)
    if widths is not None:
        width = tl.load(widths + request)
        if tl.program_id(1) == 0:
            other = tl.arange(0, padded)
            before = tl.sum(tl.load(widths + other, other < request, 0))
            tl.store(starts + request, before)
            tl.store(starts + request + 1, before + width)
    length = tl.load(seq_lens + request) + width
    slots = table + tl.load(rows + request) * stride
    pages += request * pages_stride
    begin, step = tl.program_id(1) * columns, tl.num_programs(1) * columns
    held = tl.minimum(tl.cdiv(length, page_size), most)
    for start in range(begin, held, step):
        column = start + tl.arange(0, columns)
        real = column < held
        tl.store(pages + column, tl.load(slots + column * page_size, real, 0) // page_size, real)
    if tl.program_id(1) == 0:
        tl.store(lens + request, length.to(tl.int32))
