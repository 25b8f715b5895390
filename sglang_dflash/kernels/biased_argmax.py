"""The largest logit of each token after a low-rank bias. The biased logits are never stored."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.kernels.argmax import PROGRAMS, Largest, largest_in_torch, reduce_parts

TOKENS = 16  # of a program; the least that tensor cores multiply
COLUMNS = 64  # of the vocabulary that a program reads together
RANKS = 64  # of the weight that it reads together; more would not fit the memory of a small GPU


def launch_biased_largest(
    logits: Tensor, latent: Tensor, weight: Tensor, return_probs: bool = False
) -> Largest:
    """Find the largest of `logits + latent @ weight.T` for each token.

    logits: [n, V] of a float type; latent: [n, r]; weight: [V, r], both of another float type; the
    last dimension of logits and latent is contiguous; return_probs: compute `sum_exp`, too. NaN
    counts as infinity. The weight is read once for every 16 tokens.
    """
    tokens, size = logits.shape
    assert logits.stride(1) == latent.stride(1) == 1
    groups = triton.cdiv(tokens, TOKENS)
    most_parts = triton.cdiv(size, COLUMNS)
    most_parts = min(most_parts, PROGRAMS)
    parts = min(most_parts, triton.cdiv(PROGRAMS, max(groups, 1)))
    share = triton.cdiv(size, parts * COLUMNS) * COLUMNS
    partial = Largest.empty(logits, (tokens, parts), return_probs)
    rank = latent.shape[1]
    _largest_biased_of_parts[(groups, parts)](
        logits,
        latent,
        weight,
        *partial,
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
    )
    return reduce_parts(partial, parts, most_parts)


def biased_largest_in_torch(
    logits: Tensor, latent: Tensor, weight: Tensor, return_probs: bool = False
) -> Largest:
    """The reference of `launch_biased_largest`."""
    return largest_in_torch(_biased(logits, latent, weight), return_probs)


def _biased(logits: Tensor, latent: Tensor, weight: Tensor) -> Tensor:
    if logits.dtype == weight.dtype:
        return torch.addmm(logits, latent, weight.T)
    return logits.float() + (latent @ weight.T).float()


# Triton takes annotations other than tl.constexpr for globals, and refuses them.
@triton.jit(do_not_specialize=["tokens"])
def _largest_biased_of_parts(  # type: ignore[no-untyped-def]
    logits,  # [n, V]
    latent,  # [n, r]
    weight,  # [V, r]
    indices,  # [n, parts] int64
    values,  # [n, parts] float32
    sum_exps,  # [n, parts] float32 or None
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
):
    token = (tl.program_id(0) * group + tl.arange(0, group)).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    token_mask = token < tokens
    best = tl.full([columns, group], float("-inf"), tl.float32)
    where = tl.zeros([columns, group], tl.int32) + size
    sum_exp = tl.zeros([columns, group], tl.float32)
    for start in range(0, share, columns):
        column = part * share + start + tl.arange(0, columns)
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
        logit = logit.to(tl.float32) + bias
        logit = tl.where(logit != logit, float("inf"), logit)
        if sum_exps is not None:
            ratio = tl.where(logit == best, 1.0, tl.exp(-tl.abs(logit - best)))
            sum_exp = tl.where(logit > best, sum_exp * ratio + 1.0, sum_exp + ratio)
        where = tl.where(logit > best, column[:, None], where)
        best = tl.maximum(best, logit)
    value = tl.max(best, axis=0)
    dst = token * parts + part
    lowest = tl.min(tl.where(best == value[None, :], where, size), axis=0)
    tl.store(values + dst, value, token_mask)
    tl.store(indices + dst, lowest.to(tl.int64), token_mask)
    if sum_exps is not None:
        sum_exp *= tl.where(best == value[None, :], 1.0, tl.exp(best - value[None, :]))
        tl.store(sum_exps + dst, tl.sum(sum_exp, axis=0), token_mask)
