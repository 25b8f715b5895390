"""How much of a block to verify: what its drafts are worth against what a step costs."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

BINS = 8  # of the draft's own probability
PRIOR = 8.0  # drafts that a bin must have seen to count as much as the pooled curve
DECAY = 0.99  # of the counts a step


class Survival:
    """P(a draft is accepted | all before it were), from the draft's own probability.

    A draft's probability is over- or under-confident, differently by position. Counts by position
    and probability recalibrate it online. A position that was not verified lately, because blocks
    are cut before it, falls back to what its probability means at all positions together.
    """

    def __init__(self, block_size: int) -> None:
        self._right, self._tried = np.zeros((2, block_size - 1, BINS), dtype=np.float32)
        self._at = np.arange(block_size - 1)

    def __call__(self, probability: Array) -> Array:
        """P(drafts 1..j are all accepted). probability: [B, N-1], 0 if not drafted -> [B, N-1]."""
        bins = _bins(probability)
        right, tried = self._right.sum(axis=0), self._tried.sum(axis=0)
        pooled = (right[bins] + PRIOR * probability) / (tried[bins] + PRIOR)
        here = self._right[self._at, bins] + PRIOR * pooled
        kept = here / (self._tried[self._at, bins] + PRIOR)
        return np.cumprod(kept * (probability > 0), axis=1)

    def observe(self, probability: Array, num_accepted: Array, widths: Array) -> None:
        """Learn from a step. num_accepted: [B]; widths: [B], how much of each block it verified."""
        accepted = num_accepted[:, None]
        reached = (self._at <= accepted) & (self._at < widths[:, None] - 1)
        where = np.broadcast_to(self._at, probability.shape), _bins(probability)
        for counts, seen in ((self._tried, reached), (self._right, self._at < accepted)):
            counts *= DECAY
            np.add.at(counts, where, seen)


def _bins(probability: Array) -> Array:
    return np.minimum((probability * BINS).astype(np.int64), BINS - 1)


def best_width(survival: Array, seconds: Array) -> int:
    """The one width of all requests, in 1..N, that commits most tokens a second.

    survival: [B, N-1], P(drafts 1..j accepted); seconds: [N], of a step at width 1..N, which
    commits one token a request and every accepted draft.
    """
    commits = len(survival) + np.append(0, survival.sum(axis=0).cumsum())
    return int((commits / seconds).argmax()) + 1


class StepTimes:
    """Seconds of a forward by batch size and width, with straight lines between measured widths."""

    def __init__(self, measured: dict[tuple[int, int], float], widths: Sequence[int]) -> None:
        """measured: seconds by (batch, width), the first and last of `widths` for every batch.

        widths: ascending, those to choose from, the whole block N last.
        """
        self._batches = sorted({batch for batch, _ in measured})
        every, at = range(1, widths[-1] + 1), sorted({width for _, width in measured})
        rows = [np.interp(every, at, [measured[batch, w] for w in at]) for batch in self._batches]
        self._seconds: list[Array] = list(np.where(np.isin(every, widths), rows, np.inf))

    def at(self, batch: int) -> Array:
        """Seconds at width 1..N, [N] float64, infinite at widths that are not to choose from.

        They are of the smallest measured batch that holds these, or of the largest there is.
        """
        return self._seconds[bisect.bisect_left(self._batches[:-1], batch)]
