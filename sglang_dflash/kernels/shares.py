"""What each share of the noise would have drafted, judged by the tokens of a step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.method.noise import RECENT, RECENT_OF_ALL, NoiseTable

GROUP = 16  # requests that are judged together


def launch_judge_shares(
    picks: Tensor, sampled: Tensor, num_accepted: Tensor, rows: Tensor, table: NoiseTable
) -> None:
    """Learn how many drafts of each share are right.

    picks: [C, B, N] int64, what each share would draft after accepted drafts, column 0 the anchor;
    sampled: [B, w] int64, the target's draws; num_accepted: [B] integers; rows: [B] integers, rows
    of the table. A share is judged by the committed tokens, so at most one draft more than was
    accepted is right. Picks and draws are contiguous. One program, because the last row of the
    table is the mean of all requests.
    """
    shares, requests, size = picks.shape
    assert picks.is_contiguous()
    assert sampled.is_contiguous()
    _judge_shares[(1,)](
        picks,
        sampled,
        num_accepted,
        rows,
        table.temperatures,
        table.scores,
        requests,
        len(table.temperatures),
        num_accepted.stride(0),
        sampled.shape[1],
        recent=RECENT,
        recent_of_all=RECENT_OF_ALL,
        group=GROUP,
        size=size,
        padded=triton.next_power_of_2(size),
        shares=shares,
        num_warps=4,
    )


def judge_shares_in_torch(
    picks: Tensor, sampled: Tensor, num_accepted: Tensor, rows: Tensor, table: NoiseTable
) -> None:
    """The reference of `launch_judge_shares`."""
    drawn = table.temperatures[rows] > 0
    if not bool(drawn.any()):
        return
    judged = min(picks.shape[2] - 1, sampled.shape[1])
    known = torch.arange(judged, device=rows.device) <= num_accepted[:, None]  # [B, judged]
    is_right = (picks[..., 1 : judged + 1] == sampled[:, :judged]) & known
    right = is_right.cumprod(dim=2).sum(dim=2).T[drawn]  # [drawn, C]
    scores, rows = table.scores, rows[drawn]
    scores[rows] = torch.lerp(scores[rows], right.float(), RECENT)
    recent = 1 - (1 - RECENT_OF_ALL) ** len(rows)
    scores[-1] = torch.lerp(scores[-1], right.float().mean(dim=0), recent)


# Triton takes annotations other than tl.constexpr for globals, and refuses them.
@triton.jit(do_not_specialize=["requests", "width", "accepted_stride"])
def _judge_shares(  # type: ignore[no-untyped-def]
    picks,  # [C, B, N] int64
    sampled,  # [B, w] int64
    num_accepted,  # [B]
    rows,  # [B]
    temperatures,  # [R] float32
    scores,  # [R + 1, C] float32
    requests,  # B
    last_row,  # R
    accepted_stride,
    width,  # w
    recent: tl.constexpr,
    recent_of_all: tl.constexpr,
    group: tl.constexpr,
    size: tl.constexpr,
    padded: tl.constexpr,
    shares: tl.constexpr,
):
    share = tl.arange(0, shares)
    draft = tl.arange(0, padded)[None, :, None]
    sums = tl.zeros([shares], tl.float32)
    count = 0
    for first in range(0, requests, group):
        request = first + tl.arange(0, group)  # the first dimension of tiles
        is_there = request < requests
        row = tl.load(rows + request, is_there, 0)
        drawn = tl.load(temperatures + row, is_there, 0.0) > 0.0
        accepted = tl.load(num_accepted + request * accepted_stride, is_there, 0)[:, None, None]
        known = drawn[:, None, None] & (draft <= accepted) & (draft < width) & (draft + 1 < size)
        token = tl.load(sampled + request[:, None, None] * width + draft, known, 0)
        block = share[None, None, :] * requests + request[:, None, None]
        pick = tl.load(picks + block * size + draft + 1, known, 0)
        ends = (pick != token) | (known == 0)
        right = tl.min(tl.where(ends, draft, size), axis=1).to(tl.float32)  # [group, shares]
        where = row[:, None] * shares + share[None, :]
        score = tl.load(scores + where, drawn[:, None], 0.0)
        score += recent * (right - score)
        tl.store(scores + where, score, drawn[:, None])
        sums += tl.sum(tl.where(drawn[:, None], right, 0.0), axis=0)
        count += tl.sum(drawn.to(tl.int32))
    if count > 0:
        of_all = tl.load(scores + last_row * shares + share)
        kept = tl.exp(count * tl.log(1.0 - recent_of_all))
        of_all = of_all * kept + sums / count * (1.0 - kept)
        tl.store(scores + last_row * shares + share, of_all)
