"""The slots that a paged allocation takes: SGLang's Triton kernel, on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Growth:
    """New positions of a batch, flat, in request order.

    Positions on the last page of a request continue that page (`last_slot + 1 + ...`). All others
    take the new pages in order.
    """

    request: Ints  # [T] index of the request in the batch
    position: Ints  # [T] position in the request's row
    in_tail: NDArray[np.bool_]  # [T] continues the request's last page
    tail_offset: Ints  # [T] slot minus the slot of the request's last position; valid where in_tail
    page_slot: Ints  # [T] index into the slots of the new pages; -1 where in_tail
    num_pages: int


def grow(have: list[int], want: list[int], page_size: int) -> Growth:
    """Extend request i from `have[i]` to `want[i]` positions; lengths are equal, have <= want."""
    old, new = np.asarray(have, np.int64), np.asarray(want, np.int64)
    counts = new - old
    assert (counts >= 0).all()
    request = np.repeat(np.arange(len(old)), counts)
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    position = old[request] + within
    old_end, new_end = -(-old // page_size) * page_size, -(-new // page_size) * page_size
    pages = np.maximum(new_end - old_end, 0) // page_size
    in_tail = position < old_end[request]
    first_slot = (np.cumsum(pages) - pages) * page_size
    return Growth(
        request=request,
        position=position,
        in_tail=in_tail,
        tail_offset=within + 1,
        page_slot=np.where(in_tail, -1, first_slot[request] + position - old_end[request]),
        num_pages=int(pages.sum()),
    )
