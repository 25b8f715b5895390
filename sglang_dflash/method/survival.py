"""How likely drafts are to be accepted, by what became of drafts before them.

A draft's own probability is over- or under-confident, and this differs by position. So it is
calibrated online by counts of outcomes, by position and probability. Drafts of sampled requests
follow another rule (`method.noise`) and are counted apart.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BINS = 8  # of a draft's own probability
PRIOR = 8.0  # drafts that a bin must have seen to count as much as the bins of all positions
DECAY = 0.99  # of the counts a step
GREEDY, SAMPLED = KINDS = range(2)  # of requests


class SurvivalTable(NamedTuple):
    """Drafts whose predecessors in the block were accepted, by kind, position and probability.

    The last position has the sums over all. They serve those that were not verified recently,
    because blocks are cut before them.
    """

    right: Tensor  # [2, N, BINS] float32, those that were accepted
    tried: Tensor  # [2, N, BINS] float32, those that were verified

    @classmethod
    def empty(cls, block_size: int, device: str) -> SurvivalTable:
        """block_size: positions N, the anchor's included."""
        return cls(*torch.zeros(2, len(KINDS), block_size, BINS, device=device))


def survival(probabilities: Tensor, kinds: Tensor, table: SurvivalTable) -> Tensor:
    """P(drafts 1..j of a request are all accepted), [B, M] float32, never rising along a request.

    probabilities: [B, M] float32, the draft's own of M = N - 1 drafts; kinds: [B] int64.
    """
    kind, bins = kinds[:, None], bins_of(probabilities)
    of_all = probabilities.shape[1]  # the table's last position
    pooled = table.right[kind, of_all, bins] + PRIOR * probabilities
    pooled = pooled / (table.tried[kind, of_all, bins] + PRIOR)
    draft = torch.arange(of_all, device=bins.device)
    here = table.right[kind, draft, bins] + PRIOR * pooled
    kept = here / (table.tried[kind, draft, bins] + PRIOR)
    return kept.cumprod(dim=1).cummin(dim=1).values  # products may be rounded up


def learn(
    probabilities: Tensor,
    kinds: Tensor,
    num_accepted: Tensor,
    widths: Tensor,
    table: SurvivalTable,
) -> None:
    """Count the outcome of a step.

    probabilities, kinds: as in `survival`; num_accepted: [B] int64; widths: [B] int64, positions
    that were verified. A draft behind the first wrong one, or behind the cut, shows nothing.
    """
    draft = torch.arange(probabilities.shape[1], device=kinds.device)
    tried = (draft <= num_accepted[:, None]) & (draft < widths[:, None] - 1)
    right = draft < num_accepted[:, None]
    where = kinds[:, None], draft, bins_of(probabilities)
    for counts, outcome in ((table.right, right), (table.tried, tried)):
        counts.mul_(DECAY)
        counts.index_put_(where, outcome.float(), accumulate=True)
        counts[:, -1] = counts[:, :-1].sum(dim=1)


def bins_of(probabilities: Tensor) -> Tensor:
    return (probabilities * BINS).long().clamp(max=BINS - 1)
