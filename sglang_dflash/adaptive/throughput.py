"""Expected throughput of a verify width: the drafts it would accept against the time of a step."""

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

    The draft's own probability is over- or under-confident, and this differs by position. Counts by
    position and probability recalibrate it online. A position may not have been verified recently,
    because blocks are cut before it. The estimate then falls back to the counts of all positions.
    """

    def __init__(self, block_size: int) -> None:
        self._right, self._tried = np.zeros((2, block_size - 1, BINS), dtype=np.float32)
        self._drafts = np.arange(block_size - 1)

    def __call__(self, probabilities: Array) -> Array:
        """P(drafts 1..j are all accepted), [B, N-1]. probabilities: [B, N-1], the draft's own."""
        bins = _bins(probabilities)
        right, tried = self._right.sum(axis=0), self._tried.sum(axis=0)
        pooled = (right[bins] + PRIOR * probabilities) / (tried[bins] + PRIOR)
        here = self._right[self._drafts, bins] + PRIOR * pooled
        kept = here / (self._tried[self._drafts, bins] + PRIOR)
        return np.cumprod(kept, axis=1)

    def observe(self, probabilities: Array, num_accepted: Array, widths: Array) -> None:
        """Learn from a step.

        probabilities: [B, N-1] of its drafts; num_accepted: [B]; widths: [B], the verify widths.
        """
        accepted = num_accepted[:, None]
        right = self._drafts < accepted
        tried = (self._drafts <= accepted) & (self._drafts < widths[:, None] - 1)
        where = np.broadcast_to(self._drafts, probabilities.shape), _bins(probabilities)
        self._tried *= DECAY
        self._right *= DECAY
        np.add.at(self._tried, where, tried)
        np.add.at(self._right, where, right)


def _bins(probabilities: Array) -> Array:
    return np.minimum((probabilities * BINS).astype(np.int64), BINS - 1)


def common_width(survival: Array, seconds: Array) -> int:
    """The one width of all requests, in 1..N, that commits most tokens per second.

    survival: [B, N-1], P(drafts 1..j accepted); seconds: [N], of a step at width 1..N. A step
    commits one token per request and every accepted draft.
    """
    commits = len(survival) + np.append(0, survival.sum(axis=0).cumsum())
    return int((commits / seconds).argmax()) + 1


def own_widths(survival: Array, seconds: Array) -> Array:
    """The width of each request, [B] int64 in 1..N, at which it commits most tokens per second.

    survival, seconds: as in `common_width`.

    Each request is judged by itself. All requests have to finish, so the cost is the sum of the
    time that each request adds to the steps. The commits of a single step do not count.
    """
    commits = np.ones((len(survival), len(seconds)))
    commits[:, 1:] += survival.cumsum(axis=1)
    best: Array = (commits / seconds).argmax(axis=1)
    return best + 1


def without_outliers(seconds: Array) -> Array:
    """Times of forwards, at most those of larger forwards: [batches, kinds], both ascending.

    Time grows with batch size and width, and noise can only lengthen it. So each time is capped by
    those of larger forwards. Column 0 is the draft, which has no width.
    """
    bounded = np.minimum.accumulate(seconds[::-1], axis=0)[::-1].copy()
    bounded[:, 1:] = np.minimum.accumulate(bounded[:, :0:-1], axis=1)[:, ::-1]
    return bounded


class StepTimes:
    """Seconds of a step by batch size and verify width, interpolated between measured widths."""

    def __init__(self, measured: dict[tuple[int, int], float], widths: Sequence[int]) -> None:
        """measured: seconds by (batch, width); each batch has the first and last of `widths`.

        widths: the allowed widths, ascending. The last one is the whole block N.
        """
        self._batches = sorted({batch for batch, _ in measured})
        every, at = range(1, widths[-1] + 1), sorted({width for _, width in measured})
        curves = [np.interp(every, at, [measured[batch, w] for w in at]) for batch in self._batches]
        self._seconds: list[Array] = list(np.where(np.isin(every, widths), curves, np.inf))

    def at(self, batch: int) -> Array:
        """Seconds at width 1..N, [N] float64, infinite for widths that are not allowed.

        They are those of the smallest measured batch that holds these requests, else of the
        largest.
        """
        return self._seconds[bisect.bisect_left(self._batches[:-1], batch)]
