"""How much of a block to verify: what its drafts are worth against what a step costs."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

BINS = 8  # of the draft's own probability
PRIOR = 8.0  # drafts that a bin must have seen to count as much as the pooled curve
DECAY = 0.99  # of the counts a step


class Survival:
    """P(a draft is accepted | all before it were), from the draft's own probability.

    A draft's probability is over- or under-confident, differently by position. Counts by position
    and probability recalibrate it online. A position that was not verified lately, because blocks
    are cut before it, falls back to what its probability means at all positions together.
    """

    def __init__(self, block_size: int, device: str) -> None:
        shape = (block_size - 1, BINS)
        self._right = torch.zeros(shape, device=device)
        self._tried = torch.zeros(shape, device=device)
        self._at = torch.arange(block_size - 1, device=device)

    def __call__(self, probability: Tensor) -> Tensor:
        """P(drafts 1..j are all accepted). probability: [B, N-1], 0 if not drafted -> [B, N-1]."""
        bins = _bins(probability)
        right, tried = self._right.sum(0), self._tried.sum(0)
        pooled = (right[bins] + PRIOR * probability) / (tried[bins] + PRIOR)
        here = self._right[self._at, bins] + PRIOR * pooled
        kept = here / (self._tried[self._at, bins] + PRIOR)
        return (kept * (probability > 0)).cumprod(dim=1)

    def observe(self, probability: Tensor, num_accepted: Tensor, widths: Tensor | int) -> None:
        """Learn from a step. num_accepted: [B]; widths: [B, 1] that it verified, or one of all."""
        at = self._at[: probability.shape[1]].expand_as(probability)
        right = at < num_accepted[:, None]
        reached = (at <= num_accepted[:, None]) & (at < widths - 1)
        self._tried *= DECAY
        self._right *= DECAY
        where = (at, _bins(probability))
        self._tried.index_put_(where, reached.float(), accumulate=True)
        self._right.index_put_(where, right.float(), accumulate=True)


def _bins(probability: Tensor) -> Tensor:
    return (probability * BINS).long().clamp_(0, BINS - 1)


def best_width(survival: Tensor, seconds: Tensor) -> Tensor:
    """The one width of all requests, [] int64 in 1..N, that commits most tokens a second.

    survival: [B, N-1], P(drafts 1..j accepted); seconds: [N], of a step at width 1..N, which
    commits one token a request and every accepted draft.
    """
    commits = len(survival) + pad(survival.sum(0).cumsum(0), (1, 0))
    return (commits / seconds).argmax() + 1


class StepTimes:
    """Seconds of a forward by batch size and width, with straight lines between measured widths."""

    def __init__(
        self, measured: dict[tuple[int, int], float], widths: Sequence[int], device: str
    ) -> None:
        """measured: seconds by (batch, width), the first and last of `widths` for every batch.

        widths: ascending, those to choose from, the whole block N last.
        """
        self._batches = sorted({batch for batch, _ in measured})
        every, at = range(1, widths[-1] + 1), sorted({width for _, width in measured})
        rows = [np.interp(every, at, [measured[batch, w] for w in at]) for batch in self._batches]
        seconds = np.where(np.isin(every, widths), rows, np.inf)
        self._seconds = torch.tensor(seconds, dtype=torch.float32, device=device)

    def at(self, batch: int) -> Tensor:
        """Seconds at width 1..N, [N] float32, infinite at widths that are not to choose from.

        They are of the smallest measured batch that holds these, or of the largest there is.
        """
        return self._seconds[min(bisect.bisect_left(self._batches, batch), len(self._batches) - 1)]
