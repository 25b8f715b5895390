"""The largest logit of each token. Each logit is read once, at the speed of memory.

With noise (`method.noise`), the largest sum of a logit and its noise, for each share of the noise.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.kernels.noise import gumbel, hash_of_position
from sglang_dflash.method.noise import SHARES, DraftNoise

COLUMNS = 4096  # of the vocabulary that a program reads together
PROGRAMS = 1056  # at least, for few tokens: eight per multiprocessor of an H100


class Largest(NamedTuple):
    """The largest logit of each token, [n, 1] each. With noise [n, C + 1]: at each share, then at
    the share that the request has chosen.
    """

    argmax: Tensor  # int64, the lowest index on a tie
    value: Tensor  # float32
    sum_exp: Tensor | None  # float32, of exp(logit - value); the probability is its reciprocal

    @classmethod
    def empty(cls, logits: Tensor, shape: tuple[int, ...], return_probs: bool) -> Largest:
        """Fields of this shape, where the logits are."""
        value = logits.new_empty(shape, dtype=torch.float32)
        sum_exp = torch.empty_like(value) if return_probs else None
        return cls(logits.new_empty(shape, dtype=torch.int64), value, sum_exp)


def launch_largest(
    logits: Tensor, return_probs: bool = False, noise: DraftNoise | None = None
) -> Largest:
    """Find the largest logit of each token.

    logits: [n, V] of a float type, the last dimension contiguous; return_probs: compute `sum_exp`,
    too; noise: of n drafts. NaN counts as infinity. If there are few tokens, several programs share
    the logits of each. A request without noise has the same result for all shares.
    """
    tokens, size = logits.shape
    assert logits.stride(1) == 1
    parts = min(triton.cdiv(size, COLUMNS), triton.cdiv(PROGRAMS, max(tokens, 1)))
    share = triton.cdiv(size, parts * COLUMNS) * COLUMNS
    shares = 1 if noise is None else len(SHARES)
    partial = Largest.empty(logits, (tokens, parts, shares), return_probs)
    _largest_of_parts[(tokens, parts)](
        logits,
        *partial,
        *noise_arguments(noise, tokens),
        logits.stride(0),
        size,
        share,
        columns=COLUMNS,
        shares=shares,
        num_warps=8,
    )
    return reduce_parts(partial, noise, triton.cdiv(size, COLUMNS))


def noise_arguments(noise: DraftNoise | None, tokens: int) -> tuple[Any, ...]:
    """What kernels take of the noise of so many tokens."""
    if noise is None:
        return (None,) * 6 + (0,) * 3
    drafts = noise.drafts(tokens)
    table, positions = noise.table, noise.positions
    tensors = table.seeds, table.temperatures, table.shares, noise.rows, positions, noise.ids
    return (*tensors, positions.stride(0), noise.first, drafts)


def reduce_parts(partial: Largest, noise: DraftNoise | None, most_parts: int) -> Largest:
    """The largest logit of each token from those of its parts, a field of [n, parts, 1 or C] each.

    most_parts: an upper bound, so that no number of tokens needs another compilation.
    """
    tokens, parts, shares = partial.value.shape
    width = shares if noise is None else shares + 1
    found = Largest.empty(partial.value, (tokens, width), partial.sum_exp is not None)
    _largest_of_tokens[(tokens,)](
        *partial,
        *found,
        None if noise is None else noise.choices,
        parts,
        1 if noise is None else noise.drafts(tokens),
        padded=triton.next_power_of_2(most_parts),
        shares=shares,
    )
    return found


def largest_in_torch(
    logits: Tensor, return_probs: bool = False, noise: DraftNoise | None = None
) -> Largest:
    """The reference of `launch_largest`."""
    found = _largest(logits, return_probs)
    if noise is None:
        return found
    every = [None if each is None else each.repeat(1, len(SHARES)) for each in found]
    scales, drafts = noise.scales(), noise.drafts(len(logits))
    drawn = scales.any(dim=1).nonzero().flatten()  # requests
    at = (drawn[:, None] * drafts + torch.arange(drafts, device=drawn.device)).flatten()
    numbers = noise.of(drawn).gumbel(drafts, noise.ids).flatten(0, 1)
    of_drafts = scales[drawn].repeat_interleave(drafts, dim=0)
    for share in range(len(SHARES) if len(drawn) else 0):
        best = _largest(logits[at] + of_drafts[:, share, None] * numbers, return_probs)
        for field, value in zip(every, best, strict=True):
            if field is not None and value is not None:
                field[at, share] = value[:, 0]
    chosen = noise.choices.repeat_interleave(drafts)[:, None]
    every = [None if f is None else torch.cat([f, f.gather(1, chosen)], dim=1) for f in every]
    return Largest(*every)  # type: ignore[arg-type]


def _largest(logits: Tensor, return_probs: bool) -> Largest:
    index = logits.argmax(dim=-1, keepdim=True)
    value = logits.gather(1, index).float()
    sum_exp = None
    if return_probs:
        sum_exp = (logits.float() - value).exp_().sum(dim=-1, keepdim=True)
    return Largest(index, value, sum_exp)


# Triton takes annotations other than tl.constexpr for globals, and refuses them.
@triton.jit
def _search(  # type: ignore[no-untyped-def]
    src,  # of a token's logits
    ids,  # [V] int32
    start,
    end,
    size,
    state,  # uint32, the hash of its position
    scale,  # [shares] float32, of the noise
    return_probs: tl.constexpr,
    columns: tl.constexpr,
    shares: tl.constexpr,
):
    """The largest from one column to another: its index, its value, `sum_exp`, [shares] each."""
    best = tl.full([shares, columns], float("-inf"), tl.float32)  # of each lane
    where = tl.zeros([shares, columns], tl.int32) + start + tl.arange(0, columns)[None, :]
    sum_exp = tl.zeros([shares, columns], tl.float32)
    for first in range(start, end, columns):
        column = first + tl.arange(0, columns)
        logit = tl.load(src + column, column < size, float("-inf")).to(tl.float32)[None, :]
        if shares > 1:
            numbers = gumbel(state, tl.load(ids + column, column < size, 0))
            logit += scale[:, None] * numbers[None, :]
        logit = tl.where(logit != logit, float("inf"), logit)
        if return_probs:
            ratio = tl.where(logit == best, 1.0, tl.exp(-tl.abs(logit - best)))
            sum_exp = tl.where(logit > best, sum_exp * ratio + 1.0, sum_exp + ratio)
        where = tl.where(logit > best, column[None, :], where)
        best = tl.maximum(best, logit)
    value = tl.max(best, axis=1)
    is_best = best == value[:, None]
    index = tl.min(tl.where(is_best, where, size), axis=1)
    if return_probs:
        sum_exp *= tl.where(is_best, 1.0, tl.exp(best - value[:, None]))
    return index.to(tl.int64), value, tl.sum(sum_exp, axis=1)


@triton.jit(do_not_specialize=["first"])
def _largest_of_parts(  # type: ignore[no-untyped-def]
    logits,  # [n, V]
    indices,  # [n, parts, shares] int64
    values,  # [n, parts, shares] float32
    sum_exps,  # [n, parts, shares] float32 or None
    seeds,  # [R] int64, and so on: `noise_arguments`
    temperatures,  # [R] float32
    share_of,  # [shares] float32
    rows,  # [B]
    positions,  # [B] int64
    ids,  # [V] int32
    positions_stride,
    first,
    drafts,
    stride,  # of a token
    size,  # V
    share,  # columns of a program
    columns: tl.constexpr,
    shares: tl.constexpr,
):
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = part * share
    end = start + share
    src = logits + token * stride
    probs: tl.constexpr = sum_exps is not None
    if shares == 1:
        index, value, sum_exp = _search(src, ids, start, end, size, 0, 0, probs, columns, 1)
    else:
        request = token // drafts
        row = tl.load(rows + request)
        temperature = tl.load(temperatures + row)
        if temperature > 0.0:
            position = tl.load(positions + request * positions_stride) + first + token % drafts
            state = hash_of_position(tl.load(seeds + row), position)
            scale = temperature * tl.load(share_of + tl.arange(0, shares))
            index, value, sum_exp = _search(
                src, ids, start, end, size, state, scale, probs, columns // shares, shares
            )
        else:
            index, value, sum_exp = _search(src, ids, start, end, size, 0, 0, probs, columns, 1)
            index = tl.broadcast_to(index, [shares])
            value = tl.broadcast_to(value, [shares])
            sum_exp = tl.broadcast_to(sum_exp, [shares])
    dst = (token * tl.num_programs(1) + part) * shares + tl.arange(0, shares)
    tl.store(indices + dst, index)
    tl.store(values + dst, value)
    if probs:
        tl.store(sum_exps + dst, sum_exp)


@triton.jit(do_not_specialize=["parts", "drafts"])
def _largest_of_tokens(  # type: ignore[no-untyped-def]
    indices,  # [n, parts, shares] int64
    values,  # [n, parts, shares] float32
    sum_exps,  # [n, parts, shares] float32 or None
    index,  # [n, 1 or shares + 1] int64
    value,  # float32, and so on
    sum_exp,  # float32 or None
    choices,  # [B] int64, or None without noise
    parts,
    drafts,
    padded: tl.constexpr,
    shares: tl.constexpr,
):
    token = tl.program_id(0)
    part, number = tl.arange(0, padded)[:, None], tl.arange(0, shares)[None, :]
    src = (token * parts + part) * shares + number
    each = tl.load(values + src, part < parts, float("-inf"))
    best = tl.max(each, axis=0)[None, :]
    first = tl.min(tl.where((each == best) & (part < parts), part, padded), axis=0)[None, :]
    where = tl.load(indices + (token * parts + first) * shares + number)
    dst = token + number
    if choices is not None:
        dst = token * (shares + 1) + number
        last = token * (shares + 1) + shares
        is_chosen = number == tl.load(choices + token // drafts)
        tl.store(index + last, tl.sum(tl.where(is_chosen, where, 0)))
        tl.store(value + last, tl.max(tl.where(is_chosen, best, float("-inf"))))
    tl.store(index + dst, where)
    tl.store(value + dst, best)
    if sum_exps is not None:
        share = tl.load(sum_exps + src, part < parts, 0.0)
        share *= tl.where(each == best, 1.0, tl.exp(each - best))
        each = tl.sum(share, axis=0)[None, :]
        tl.store(sum_exp + dst, each)
        if choices is not None:
            tl.store(sum_exp + last, tl.sum(tl.where(is_chosen, each, 0.0)))
