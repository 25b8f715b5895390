"""A width a request: what its next drafts are worth, and how many of them pay."""

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


def best_widths(survival: Array, taken: Array, accepted: Array | None = None) -> Array:
    """The width of each request, [B] int64 in 1..N, at which it commits most tokens a second.

    survival: [B, N-1], P(drafts 1..j accepted), 0 for what was not drafted. A step commits one
    token a request and every accepted draft. taken: [N] or [B, N], seconds of a step of which all
    requests take 0..N-1 drafts; accepted: [N], seconds on top of them, by accepted drafts.

    Each request by itself: all have to be finished, so what counts is the sum of what each takes
    of the steps, not what a single step commits.
    """
    drafts = np.arange(survival.shape[1] + 1)
    commits = np.ones((len(survival), len(drafts)))
    commits[:, 1:] += survival.cumsum(axis=1)
    seconds = taken if accepted is None else taken + np.interp(commits - 1, drafts, accepted)
    rates = commits / seconds
    rates[:, 1:][survival == 0] = 0
    return 1 + rates.argmax(axis=1)
