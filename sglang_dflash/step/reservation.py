"""The KV slots that a request needs before a step: pure host arithmetic.

Slots are over-allocated and reused. A step never frees them. A request holds slots for its
committed tokens and for the blocks after them. The rejected part of a block is written again.
SGLang frees the surplus with the request (`Req.pop_overallocated_kv_cache`).
"""

from __future__ import annotations

import math

GRAIN = 64  # slots are taken in runs of this many, so that most steps take none


def ceil_align(value: int, page_size: int) -> int:
    return -(-value // page_size) * page_size


def reserved_end(committed: int, count: int, page_size: int, row_width: int) -> int:
    """The end of a request's slots, so that `count` tokens fit after its committed ones.

    The end is at most the row's width, which exceeds the context by more than a block. The count
    exceeds it only by rounding, or for a block that is drafted ahead for a request that ends. Such
    slots are never needed.
    """
    return min(ceil_align(committed + count, math.lcm(GRAIN, page_size)), row_width)


def longest(pool: int, count: int, page_size: int) -> int:
    """The most committed tokens for which a pool of this size can still reserve `count` more."""
    grain = math.lcm(GRAIN, page_size)
    return pool // grain * grain - count
