"""A width for each request, which only a CPU serves: what its drafts are worth, before and after.

Before: a draft that stands blocks of any size (`variable_block_size`) is given no more masks than
pay, so what the next drafts will be worth is foretold from the last ones.
"""

from __future__ import annotations

import numpy as np

from sglang_dflash.core.width import Array

FADING = 0.8  # of a request's counts a block
FORGETTING = 0.98  # the same at positions that are not drafted, which are tried again some time
PRIOR, PRIOR_WEIGHT = 0.9, 0.5  # P(a draft survives) of one not seen, and how many that counts as


class Outlook:
    """P(drafts are accepted) before they are drafted, from the survival of a request's last ones.

    By position, given that all before it were accepted: where drafts come in bursts, as in code,
    one that survived promises more.
    """

    def __init__(self, rows: int, block_size: int) -> None:
        """rows: places for requests, as `req_pool_indices` count them."""
        self._right, self._tried = np.zeros((2, rows, block_size - 1), dtype=np.float32)

    def forget(self, rows: Array) -> None:
        """New requests are in these rows, [B] int64."""
        self._right[rows] = self._tried[rows] = 0

    def __call__(self, rows: Array) -> Array:
        """P(drafts 1..j of the next block will all be accepted), [B, N-1]."""
        right, tried = self._right[rows] + PRIOR * PRIOR_WEIGHT, self._tried[rows] + PRIOR_WEIGHT
        return (right / tried).cumprod(axis=1)

    def observe(self, rows: Array, survival: Array, drafted: Array) -> None:
        """Learn from blocks. survival: [B, N-1] of their drafts; drafted: [B, N-1] bool."""
        fading = np.where(drafted, FADING, FORGETTING)
        tried = drafted.astype(np.float32)
        tried[:, 1:] *= survival[:, :-1]
        self._tried[rows] = fading * self._tried[rows] + tried
        self._right[rows] = fading * self._right[rows] + survival


def best_widths(survival: Array, seconds: Array) -> Array:
    """The width of each request, [B] int64 in 1..N, at which it commits most tokens a second.

    survival: [B, N-1], P(drafts 1..j accepted), 0 of what was not drafted; seconds: [N] or [B, N],
    of a step in which all requests have width 1..N, which commits a token and accepted drafts.

    Each request by itself: all have to be finished, so what counts is the sum of what each takes
    of the steps, not what a single step commits.
    """
    commits = np.ones((len(survival), seconds.shape[-1]))
    commits[:, 1:] += survival.cumsum(axis=1)
    rates = commits / seconds
    rates[:, 1:][survival == 0] = 0  # measured times are noisy: more may seem to take less
    best: Array = rates.argmax(axis=1)
    return best + 1
