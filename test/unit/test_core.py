"""The arithmetic of the method, compared with slow loops, without SGLang."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dflash.cpu.v0_5_13.paged_growth import grow
from sglang_dflash.kernels.next_block import next_block_in_torch
from sglang_dflash.method.acceptance import accept
from sglang_dflash.step.reservation import ceil_align, longest, reserved_end


def slow_accept(block: list[int], drawn: list[int]) -> list[int]:
    """Committed tokens of one request, one at a time."""
    committed = [drawn[0]]
    for draft, token in zip(block[1:], drawn[1:], strict=True):
        if draft != committed[-1]:
            break
        committed.append(token)
    return committed


@given(
    st.integers(2, 6).flatmap(
        lambda w: st.lists(
            st.tuples(*[st.lists(st.integers(0, 2), min_size=w, max_size=w)] * 2),
            min_size=1,
            max_size=5,
        )
    )
)
def test_accept(rows: list[tuple[list[int], list[int]]]) -> None:
    block = torch.tensor([b for b, _ in rows])
    drawn = torch.tensor([d for _, d in rows])
    num_accepted, bonus = accept(block, drawn)
    for i, (b, d) in enumerate(rows):
        committed = slow_accept(b, d)
        assert drawn[i, : num_accepted[i] + 1].tolist() == committed
        assert bonus[i] == committed[-1]


def test_next_block() -> None:
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    rows, seq_lens = torch.tensor([2, 0]), torch.tensor([0, 5])
    block = next_block_in_torch(torch.tensor([7, 8]), seq_lens, rows, table, 4, 99)
    assert block.token_ids.tolist() == [[7, 99, 99, 99], [8, 99, 99, 99]]
    assert block.positions.tolist() == [[0, 1, 2, 3], [5, 6, 7, 8]]
    assert block.slots.tolist() == [[20, 21, 22, 23], [5, 6, 7, 8]]


@settings(max_examples=200)
@given(
    st.sampled_from([1, 4, 16]),
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=5),
)
def test_grow(page: int, lengths: list[tuple[int, int]]) -> None:
    """Positions are new, no two requests share a page, and offsets in a page are right."""
    have = [h for h, _ in lengths]
    want = [h + more for h, more in lengths]
    growth = grow(have, want, page)
    fresh = np.arange(growth.num_pages * page) + 10_000 * page
    used: dict[int, int] = {}
    for request, position, in_tail, offset, index in zip(
        growth.request,
        growth.position,
        growth.in_tail,
        growth.tail_offset,
        growth.page_slot,
        strict=True,
    ):
        last = 100 * page * (request + 1) + (have[request] - 1) % page
        slot = last + offset if in_tail else fresh[index]
        assert slot % page == position % page
        assert used.setdefault(slot // page, request) == request
    expected = [
        (i, p) for i, (h, w) in enumerate(zip(have, want, strict=True)) for p in range(h, w)
    ]
    assert list(zip(growth.request, growth.position, strict=True)) == expected
    pages = [
        ceil_align(w, page) // page - ceil_align(h, page) // page
        for h, w in zip(have, want, strict=True)
    ]
    assert growth.num_pages == sum(pages)


def test_reserved_end() -> None:
    assert reserved_end(10, 16, 1, 4096) == 64
    assert reserved_end(48, 16, 1, 4096) == 64
    assert reserved_end(49, 16, 16, 4096) == 128
    assert reserved_end(10, 16, 256, 4096) == 256
    assert reserved_end(10, 16, 48, 4096) == 192  # whole pages
    assert reserved_end(4090, 16, 256, 4116) == 4116


@given(st.integers(300, 5000), st.integers(2, 16), st.sampled_from([1, 4, 48, 256]))
def test_longest_request_can_reserve_its_block(pool: int, count: int, page: int) -> None:
    room = longest(pool // page * page, count, page)
    assert reserved_end(room, count, page, 10**6) <= pool
