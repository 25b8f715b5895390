"""The largest logit of each token after a low-rank bias. The biased logits are never stored."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.kernels.argmax import (
    PROGRAMS,
    Largest,
    largest_in_torch,
    noise_arguments,
    reduce_parts,
)
from sglang_dflash.kernels.noise import gumbel, hash_of_position
from sglang_dflash.method.noise import SHARES, DraftNoise

TOKENS = 16  # of a program; the least that tensor cores multiply
COLUMNS = 64  # of the vocabulary that a program reads together
RANKS = 64  # of the weight that it reads together; more would not fit the memory of a small GPU


def launch_biased_largest(
    logits: Tensor,
    latent: Tensor,
    weight: Tensor,
    return_probs: bool = False,
    noise: DraftNoise | None = None,
) -> Largest:
    """Find the largest of `logits + latent @ weight.T` for each token.

    logits: [n, V] of a float type; latent: [n, r]; weight: [V, r], both of another float type; the
    last dimension of logits and latent is contiguous; the others as in `launch_largest`. NaN counts
    as infinity. The weight is read once for every 16 tokens.
    """
    tokens, size = logits.shape
    assert logits.stride(1) == latent.stride(1) == 1
    groups = triton.cdiv(tokens, TOKENS)
    most_parts = triton.cdiv(size, COLUMNS)
    most_parts = min(most_parts, PROGRAMS)
    parts = min(most_parts, triton.cdiv(PROGRAMS, max(groups, 1)))
    share = triton.cdiv(size, parts * COLUMNS) * COLUMNS
    shares = 1 if noise is None else len(SHARES)
    partial = Largest.empty(logits, (tokens, parts, shares), return_probs)
    rank = latent.shape[1]
    _largest_biased_of_parts[(groups, parts)](
        logits,
        latent,
        weight,
        *partial,
        *noise_arguments(noise, tokens),
        logits.stride(0),
        latent.stride(0),
        *weight.stride(),
        tokens,
        size,
        rank,
        share,
        group=TOKENS,
        columns=COLUMNS,
        ranks=RANKS,
        shares=shares,
    )
    return reduce_parts(partial, noise, most_parts)


def biased_largest_in_torch(
    logits: Tensor,
    latent: Tensor,
    weight: Tensor,
    return_probs: bool = False,
    noise: DraftNoise | None = None,
) -> Largest:
    """The reference of `launch_biased_largest`."""
    return largest_in_torch(_biased(logits, latent, weight), return_probs, noise)


def _biased(logits: Tensor, latent: Tensor, weight: Tensor) -> Tensor:
    if logits.dtype == weight.dtype:
        return torch.addmm(logits, latent, weight.T)
    return logits.float() + (latent @ weight.T).float()


# Triton takes annotations other than tl.constexpr for globals, and refuses them.
@triton.jit
def _search(  # type: ignore[no-untyped-def]
    logits,  # [n, V]
    latent,  # [n, r]
    weight,  # [V, r]
    ids,  # [V] int32
    token,  # [group] int64
    token_mask,
    start,
    end,
    state,  # [group] uint32, the hash of each position
    scale,  # [shares, group] float32, of the noise
    logits_stride,
    latent_stride,
    weight_stride,
    rank_stride,
    size,  # V
    rank,  # r
    group: tl.constexpr,
    columns: tl.constexpr,
    ranks: tl.constexpr,
    return_probs: tl.constexpr,
    shares: tl.constexpr,
):
    """The largest from one column to another: its index, its value, `sum_exp`.

    The results are [shares, group], the tiles [shares, columns, group].
    """
    best = tl.full([shares, columns, group], float("-inf"), tl.float32)
    where = tl.zeros([shares, columns, group], tl.int32) + size
    sum_exp = tl.zeros([shares, columns, group], tl.float32)
    for begin in range(start, end, columns):
        column = begin + tl.arange(0, columns)
        column_mask = column < size
        row = column.to(tl.int64)[:, None]
        bias = tl.zeros([columns, group], tl.float32)
        for first in range(0, rank, ranks):
            rank_index = first + tl.arange(0, ranks)
            rank_mask = rank_index < rank
            weight_src = weight + row * weight_stride + rank_index[None, :] * rank_stride
            matrix = tl.load(weight_src, column_mask[:, None] & rank_mask[None, :], 0.0)
            latent_src = latent + token[None, :] * latent_stride + rank_index[:, None]
            mixed = tl.load(latent_src, rank_mask[:, None] & token_mask[None, :], 0.0)
            bias = tl.dot(matrix, mixed, bias, input_precision="ieee")
        mask = column_mask[:, None] & token_mask[None, :]
        logit = tl.load(logits + token[None, :] * logits_stride + row, mask, float("-inf"))
        logit = (logit.to(tl.float32) + bias)[None, :, :]
        if shares > 1:
            token_id = tl.load(ids + column, column_mask, 0)
            numbers = gumbel(state[None, :], token_id[:, None])
            logit += scale[:, None, :] * numbers[None, :, :]
        logit = tl.where(logit != logit, float("inf"), logit)
        if return_probs:
            ratio = tl.where(logit == best, 1.0, tl.exp(-tl.abs(logit - best)))
            sum_exp = tl.where(logit > best, sum_exp * ratio + 1.0, sum_exp + ratio)
        where = tl.where(logit > best, column[None, :, None], where)
        best = tl.maximum(best, logit)
    value = tl.max(best, axis=1)
    is_best = best == value[:, None, :]
    index = tl.min(tl.where(is_best, where, size), axis=1)
    if return_probs:
        sum_exp *= tl.where(is_best, 1.0, tl.exp(best - value[:, None, :]))
    return index.to(tl.int64), value, tl.sum(sum_exp, axis=1)


@triton.jit(do_not_specialize=["tokens", "first"])
def _largest_biased_of_parts(  # type: ignore[no-untyped-def]
    logits,  # [n, V]
    latent,  # [n, r]
    weight,  # [V, r]
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
    logits_stride,  # of a token
    latent_stride,  # of a token
    weight_stride,  # of a column
    rank_stride,
    tokens,  # n
    size,  # V
    rank,  # r
    share,  # columns of a program
    group: tl.constexpr,
    columns: tl.constexpr,
    ranks: tl.constexpr,
    shares: tl.constexpr,
):
    token = (tl.program_id(0) * group + tl.arange(0, group)).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    token_mask = token < tokens
    start = part * share
    end = start + share
    probs: tl.constexpr = sum_exps is not None
    none = tl.zeros([group], tl.float32)
    if shares == 1:
        index, value, sum_exp = _search(
            logits, latent, weight, ids, token, token_mask, start, end, none, none,
            logits_stride, latent_stride, weight_stride, rank_stride, size, rank,
            group, columns, ranks, probs, 1,
        )  # fmt: skip
    else:
        request = token // drafts
        row = tl.load(rows + request, token_mask, 0)
        temperature = tl.load(temperatures + row, token_mask, 0.0)
        if tl.max(temperature) > 0.0:
            position = tl.load(positions + request * positions_stride, token_mask, 0)
            state = hash_of_position(tl.load(seeds + row), position + first + token % drafts)
            scale = tl.load(share_of + tl.arange(0, shares))[:, None] * temperature[None, :]
            index, value, sum_exp = _search(
                logits, latent, weight, ids, token, token_mask, start, end, state, scale,
                logits_stride, latent_stride, weight_stride, rank_stride, size, rank,
                group, columns // shares, ranks, probs, shares,
            )  # fmt: skip
        else:
            index, value, sum_exp = _search(
                logits, latent, weight, ids, token, token_mask, start, end, none, none,
                logits_stride, latent_stride, weight_stride, rank_stride, size, rank,
                group, columns, ranks, probs, 1,
            )  # fmt: skip
            index = tl.broadcast_to(index, [shares, group])
            value = tl.broadcast_to(value, [shares, group])
            sum_exp = tl.broadcast_to(sum_exp, [shares, group])
    dst = (token * parts + part)[None, :] * shares + tl.arange(0, shares)[:, None]
    tl.store(values + dst, value, token_mask[None, :])
    tl.store(indices + dst, index, token_mask[None, :])
    if probs:
        tl.store(sum_exps + dst, sum_exp, token_mask[None, :])
