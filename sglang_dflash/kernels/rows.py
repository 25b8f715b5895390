"""The rows that a verify of a batch has: the likeliest drafts of all requests, of so many in all.

A draft's score is P(it is committed), `method.survival`. Which rows are taken is decided on the
device. The host knows only how many.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from sglang_dflash.method.block import Ragged
from sglang_dflash.method.survival import BINS, DECAY, KINDS, PRIOR, SurvivalTable


class Rows(NamedTuple):
    """The chosen rows, and what any number of rows would be worth."""

    lens: Tensor  # [B] int64, rows of each request, its anchor among them
    indices: Tensor  # [R] int64, ascending, in the flattened block [B * N]
    gains: Tensor  # [N] float32: tokens that a request commits at 1..N rows a request, the mean

    @property
    def ragged(self) -> Ragged:
        return Ragged(self.lens, self.indices)


def launch_choose_rows(scores: Tensor, count: int) -> Rows:
    """Choose the anchors and the drafts with the highest scores.

    scores: [B, M] float32 of M = N - 1 drafts, contiguous, at least 0; count: rows R in all, in
    B..B*N. Of equal scores, those of the first requests are chosen, from the front. So where no
    score is above one before it, as in `launch_survival`, a request's rows are the first ones of
    its block. One program.
    """
    requests, drafts = scores.shape
    assert scores.is_contiguous()
    lens, indices = (scores.new_empty(size, dtype=torch.int64) for size in (requests, count))
    rows = Rows(lens, indices, scores.new_empty(drafts + 1))
    padded = triton.next_power_of_2(requests), triton.next_power_of_2(drafts)
    _choose_rows[(1,)](
        scores,
        *rows,
        requests,
        drafts,
        count - requests,
        padded_requests=padded[0],
        padded_drafts=padded[1],
        num_warps=4 if padded[0] * padded[1] <= 1024 else 16,
    )
    return rows


def choose_rows_in_torch(scores: Tensor, count: int) -> Rows:
    """The reference of `launch_choose_rows`."""
    requests, drafts = scores.shape
    best = scores.flatten().sort(descending=True, stable=True)
    gains = best.values.cumsum(dim=0)[requests - 1 :: requests] / requests
    kept = torch.zeros(requests * drafts, dtype=torch.bool, device=scores.device)
    kept[best.indices[: count - requests]] = True
    kept = F.pad(kept.view(requests, drafts), (1, 0), value=True)  # with the anchors
    return Rows(
        lens=kept.sum(dim=1),
        indices=kept.flatten().nonzero().squeeze(1),
        gains=F.pad(gains, (1, 0)) + 1.0,
    )


# Triton takes annotations other than tl.constexpr for globals, and refuses them.
@triton.jit(do_not_specialize=["requests", "count"])
def _choose_rows(  # type: ignore[no-untyped-def]
    scores,  # [B, M] float32
    lens,  # [B] int64
    indices,  # [R] int64
    gains,  # [M + 1] float32
    requests,  # B
    drafts,  # M
    count,  # drafts to choose
    padded_requests: tl.constexpr,
    padded_drafts: tl.constexpr,
):
    size: tl.constexpr = padded_requests * padded_drafts
    request = tl.arange(0, padded_requests)
    draft = tl.arange(0, padded_drafts)
    is_there = (request < requests)[:, None] & (draft < drafts)[None, :]
    score = tl.load(scores + request[:, None] * drafts + draft[None, :], is_there, -1.0)
    flat = tl.reshape(score, [size])
    best = tl.sort(flat, descending=True)
    place = tl.arange(0, size)
    sums = tl.cumsum(tl.where(best >= 0.0, best, 0.0)) / requests
    is_shown = (place < requests * drafts) & ((place + 1) % requests == 0)
    tl.store(gains + (place + 1) // requests, sums + 1.0, is_shown)
    tl.store(gains, 1.0)
    least = tl.sum(tl.where(place == count - 1, best, 0.0))  # of the chosen scores
    above = tl.sum((flat > least).to(tl.int32))
    ties = tl.cumsum((flat == least).to(tl.int32))
    is_chosen = (flat > least) | ((flat == least) & (ties <= count - above))
    is_chosen = is_chosen & (count > 0)
    chosen = tl.reshape(is_chosen.to(tl.int32), [padded_requests, padded_drafts])
    width = tl.sum(chosen, axis=1) + 1
    width = tl.where(request < requests, width, 0)
    start = tl.cumsum(width) - width  # rows of the requests before
    rank = tl.cumsum(chosen, axis=1)
    index = request * (drafts + 1)
    tl.store(lens + request, width.to(tl.int64), request < requests)
    tl.store(indices + start, index.to(tl.int64), request < requests)
    source = index[:, None] + draft[None, :] + 1
    tl.store(indices + start[:, None] + rank, source.to(tl.int64), (chosen > 0) & is_there)


def launch_survival(probabilities: Tensor, kinds: Tensor, table: SurvivalTable) -> Tensor:
    """As `method.survival.survival`. Rows of probabilities are contiguous.

    One program per request.
    """
    requests, drafts = probabilities.shape
    assert probabilities.stride(1) == 1
    scores = probabilities.new_empty(requests, drafts)
    _survival[(requests,)](
        probabilities,
        kinds,
        *table,
        scores,
        probabilities.stride(0),
        drafts,
        padded=triton.next_power_of_2(drafts),
        bins=BINS,
        prior=PRIOR,
        num_warps=1,
    )
    return scores


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["probabilities"])
def _survival(  # type: ignore[no-untyped-def]
    probabilities,  # [B, M] float32
    kinds,  # [B] int64
    right,  # [2, M + 1, bins] float32
    tried,  # [2, M + 1, bins] float32
    scores,  # [B, M] float32
    stride,
    drafts,
    padded: tl.constexpr,
    bins: tl.constexpr,
    prior: tl.constexpr,
):
    request = tl.program_id(0)
    draft = tl.arange(0, padded)
    is_there = draft < drafts
    own = tl.load(probabilities + request * stride + draft, is_there, 0.0)
    of_kind = tl.load(kinds + request) * (drafts + 1) * bins
    bin = tl.minimum((own * bins).to(tl.int32), bins - 1)
    here, of_all = of_kind + draft * bins + bin, of_kind + drafts * bins + bin
    pooled = tl.load(right + of_all, is_there, 0.0) + prior * own
    pooled = pooled / (tl.load(tried + of_all, is_there, 0.0) + prior)
    kept = tl.load(right + here, is_there, 0.0) + prior * pooled
    kept = kept / (tl.load(tried + here, is_there, 0.0) + prior)
    # A scan multiplies in another order for each element, and so may round a later one up.
    score = tl.associative_scan(tl.cumprod(kept), 0, _least)
    tl.store(scores + request * drafts + draft, score, is_there)


@triton.jit
def _least(a, b):  # type: ignore[no-untyped-def]
    return tl.minimum(a, b)


def launch_learn_survival(
    probabilities: Tensor,
    kinds: Tensor,
    num_accepted: Tensor,
    widths: Tensor,
    table: SurvivalTable,
) -> None:
    """As `method.survival.learn`. Rows of probabilities are contiguous.

    One program per position. It adds in a fixed order, so that all ranks have the same counts.
    """
    requests, drafts = probabilities.shape
    assert probabilities.stride(1) == 1
    _learn_survival[(drafts + 1,)](
        probabilities,
        kinds,
        num_accepted,
        widths,
        *table,
        requests,
        drafts,
        probabilities.stride(0),
        num_accepted.stride(0),
        widths.stride(0),
        padded=triton.next_power_of_2(requests),
        bins=BINS,
        decay=DECAY,
        kinds_known=len(KINDS),
        num_warps=4,
    )


@triton.jit(
    do_not_specialize=["requests", "stride", "accepted_stride", "widths_stride"],
    do_not_specialize_on_alignment=["probabilities", "num_accepted", "widths"],
)
def _learn_survival(  # type: ignore[no-untyped-def]
    probabilities,  # [B, M] float32
    kinds,  # [B] int64
    num_accepted,  # [B] int64
    widths,  # [B] int64
    right,  # [kinds, M + 1, bins] float32
    tried,  # [kinds, M + 1, bins] float32
    requests,  # B
    drafts,  # M
    stride,
    accepted_stride,
    widths_stride,
    padded: tl.constexpr,
    bins: tl.constexpr,
    decay: tl.constexpr,
    kinds_known: tl.constexpr,
):
    position = tl.program_id(0)
    request = tl.arange(0, padded)
    is_there = request < requests
    kind = tl.load(kinds + request, is_there, 0).to(tl.int32)
    accepted = tl.load(num_accepted + request * accepted_stride, is_there, 0)
    width = tl.load(widths + request * widths_stride, is_there, 0)
    column = tl.arange(0, kinds_known * bins)
    new_right = tl.zeros([kinds_known * bins], tl.float32)
    new_tried = tl.zeros([kinds_known * bins], tl.float32)
    first, end = position, position + 1
    if position == drafts:  # the sums over all positions
        first, end = 0, drafts
    for draft in range(first, end):
        own = tl.load(probabilities + request * stride + draft, is_there, 0.0)
        bin = tl.minimum((own * bins).to(tl.int32), bins - 1)
        in_column = ((kind * bins + bin)[:, None] == column[None, :]) & is_there[:, None]
        is_tried = (draft <= accepted) & (draft < width - 1)
        is_right = draft < accepted
        new_tried += tl.sum((in_column & is_tried[:, None]).to(tl.float32), axis=0)
        new_right += tl.sum((in_column & is_right[:, None]).to(tl.float32), axis=0)
    where = (column // bins) * (drafts + 1) * bins + position * bins + column % bins
    tl.store(right + where, tl.load(right + where) * decay + new_right)
    tl.store(tried + where, tl.load(tried + where) * decay + new_tried)
