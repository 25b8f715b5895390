"""The target's draws: the largest sum of logit and noise among the tokens that a filter keeps.

A token is kept if fewer than `top_k` tokens are more probable, if their probabilities sum to at
most `top_p`, and if its own is at least `min_p` of the largest. This is SGLang's rule. Its two
sampling backends differ in two cases. Here tokens of equal probability are all kept or none, as by
FlashInfer, and `min_p` does not change what `top_p` keeps, as by PyTorch.

If the best token is not kept, then no less probable one is, and the search goes on among the more
probable ones. So nothing is sorted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.kernels.noise import gumbel, hash_of_position
from sglang_dflash.method.noise import gumbel as gumbel_in_torch

COLUMNS = 4096  # of the vocabulary that a program reads together


class Sampling(NamedTuple):
    """How B requests sample."""

    temperatures: Tensor  # [B] float32
    top_ks: Tensor  # [B] int32; 1: the argmax
    top_ps: Tensor  # [B] float32
    min_ps: Tensor  # [B] float32
    rows: Tensor  # [B] integers, rows of `seeds`
    seeds: Tensor  # [R] int64
    filters: bool  # whether any of them filters tokens, known to the host


def launch_draw(
    logits: Tensor, sampling: Sampling, positions: Tensor, requests: Tensor | None
) -> Tensor:
    """Draw the token after each of T positions: [T] int64.

    logits: [T, V] of a float type, the last dimension contiguous; positions: [T] int64, contiguous;
    requests: [T] int64, the request of each; None if all B have as many positions, one after
    another. NaN counts as infinity. One program per position.
    """
    tokens, size = logits.shape
    assert logits.stride(1) == 1
    assert positions.is_contiguous()
    drawn = positions.new_empty(tokens, dtype=torch.int64)
    _draw[(tokens,)](
        logits,
        *sampling[:-1],
        positions,
        requests,
        drawn,
        tokens // len(sampling.rows),
        logits.stride(0),
        size,
        columns=COLUMNS,
        filters=sampling.filters,
        num_warps=8,
    )
    return drawn


def draw_in_torch(
    logits: Tensor, sampling: Sampling, positions: Tensor, requests: Tensor | None
) -> Tensor:
    """The reference of `launch_draw`."""
    tokens, size = logits.shape
    each = len(sampling.rows)
    if requests is None:
        requests = torch.arange(each, device=logits.device).repeat_interleave(tokens // each)
    temperature, top_k, top_p, min_p, row = (field[requests, None] for field in sampling[:5])
    temperature = temperature.clamp(max=torch.finfo(torch.float32).max)
    ids = torch.arange(size, device=logits.device)
    noise = gumbel_in_torch(sampling.seeds[row], positions[:, None], ids)
    is_greedy = top_k <= 1
    scaled = logits.float() / torch.where(is_greedy, 1.0, temperature)
    scores = torch.where(is_greedy, scaled, scaled + noise)
    if sampling.filters:
        ranked = scaled.sort(dim=-1, descending=True).values
        probs = ranked.softmax(dim=-1)
        kept = (ids < top_k) & (probs.cumsum(dim=-1) - probs <= top_p)
        kept &= probs >= min_p * probs[:, :1]
        least = ranked.gather(1, kept.sum(dim=-1, keepdim=True).sub_(1).clamp_(min=0))
        scores = scores.masked_fill_(scaled < least, float("-inf"))
    return scores.argmax(dim=-1)


# Triton takes annotations other than tl.constexpr for globals, and refuses them.
@triton.jit
def _load(src, column, size):  # type: ignore[no-untyped-def]
    """Logits in float32, where NaN counts as infinity."""
    logit = tl.load(src + column, column < size, float("-inf")).to(tl.float32)
    return tl.where(logit != logit, float("inf"), logit)


@triton.jit
def _best(src, size, above, state, temperature, is_greedy, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    """The token of the largest score among those whose logit is above a number, 0 if none is."""
    best = tl.full([columns], float("-inf"), tl.float32)  # of each lane
    where = tl.arange(0, columns)
    for start in range(0, size, columns):
        column = start + tl.arange(0, columns)
        logit = _load(src, column, size)
        score = logit
        if not is_greedy:
            score = logit / temperature + gumbel(state, column)
        score = tl.where(logit > above, score, float("-inf"))
        where = tl.where(score > best, column, where)
        best = tl.maximum(best, score)
    return tl.min(tl.where(best == tl.max(best), where, size))


@triton.jit
def _peak(src, size, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest logit."""
    best = tl.full([columns], float("-inf"), tl.float32)
    for start in range(0, size, columns):
        best = tl.maximum(best, _load(src, start + tl.arange(0, columns), size))
    return tl.max(best)


@triton.jit
def _above(src, size, least, peak, temperature, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tokens whose logit is above a number: how many they are, and their part of `sum_exp`."""
    count = tl.zeros([columns], tl.int32)
    mass = tl.zeros([columns], tl.float32)
    for start in range(0, size, columns):
        logit = _load(src, start + tl.arange(0, columns), size)
        is_above = logit > least
        count += is_above.to(tl.int32)
        mass += tl.where(is_above, tl.exp((logit - peak) / temperature), 0.0)
    return tl.sum(count), tl.sum(mass)


@triton.jit(do_not_specialize=["width"])
def _draw(  # type: ignore[no-untyped-def]
    logits,  # [T, V]
    temperatures,  # [B] float32
    top_ks,  # [B] int32
    top_ps,  # [B] float32
    min_ps,  # [B] float32
    rows,  # [B]
    seeds,  # [R] int64
    positions,  # [T] int64
    requests,  # [T] int64 or None
    drawn,  # [T] int64
    width,
    stride,  # of a position's logits
    size,  # V
    columns: tl.constexpr,
    filters: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    if requests is None:  # noqa: SIM108
        request = token // width
    else:
        request = tl.load(requests + token)
    src = logits + token * stride
    temperature = tl.load(temperatures + request)
    top_k = tl.load(top_ks + request)
    is_greedy = top_k <= 1
    state = hash_of_position(tl.load(seeds + tl.load(rows + request)), tl.load(positions + token))
    nothing = float("-inf")
    index = _best(src, size, nothing, state, temperature, is_greedy, columns)
    if filters:
        top_p, min_p = tl.load(top_ps + request), tl.load(min_ps + request)
        if (top_k > 1) & ((top_k < size) | (top_p < 1.0) | (min_p > 0.0)):
            peak = _peak(src, size, columns)
            _, total = _above(src, size, nothing, peak, temperature, columns)
            least = peak + temperature * tl.log(min_p)
            searching = (peak > nothing) & (peak < float("inf"))
            while searching:
                logit = tl.load(src + index).to(tl.float32)
                count, mass = _above(src, size, logit, peak, temperature, columns)
                kept = (count < top_k) & (mass <= top_p * total) & (logit >= least)
                searching = (count > 0) & (kept == 0)
                if searching:
                    index = _best(src, size, logit, state, temperature, is_greedy, columns)
    tl.store(drawn + token, index)
