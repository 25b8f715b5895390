"""The largest logit of each token. Each logit is read once, at the speed of memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 4096  # of the vocabulary that a program reads together
PROGRAMS = 1056  # at least, for few tokens: eight per multiprocessor of an H100


class Largest(NamedTuple):
    """The largest logit of each token, a field of [n] each."""

    argmax: Tensor  # int64, the lowest index on a tie
    value: Tensor  # float32
    sum_exp: Tensor | None  # float32, of exp(logit - value); the probability is its reciprocal

    @classmethod
    def empty(cls, logits: Tensor, shape: tuple[int, ...], return_probs: bool) -> Largest:
        """Fields of this shape, where the logits are."""
        value = logits.new_empty(shape, dtype=torch.float32)
        sum_exp = torch.empty_like(value) if return_probs else None
        return cls(logits.new_empty(shape, dtype=torch.int64), value, sum_exp)


def launch_largest(logits: Tensor, return_probs: bool = False) -> Largest:
    """Find the largest logit of each token.

    logits: [n, V] of a float type, the last dimension contiguous; return_probs: compute `sum_exp`,
    too. NaN counts as infinity. If there are few tokens, several programs share the logits of each.
    """
    tokens, size = logits.shape
    assert logits.stride(1) == 1
    parts = min(triton.cdiv(size, COLUMNS), triton.cdiv(PROGRAMS, max(tokens, 1)))
    share = triton.cdiv(size, parts * COLUMNS) * COLUMNS
    partial = Largest.empty(logits, (tokens, parts), return_probs)
    _largest_of_parts[(tokens, parts)](
        logits, *partial, logits.stride(0), size, share, columns=COLUMNS, num_warps=8
    )
    return reduce_parts(partial, parts, triton.cdiv(size, COLUMNS))


def reduce_parts(partial: Largest, parts: int, most_parts: int) -> Largest:
    """The largest logit of each token, [n] per field, from those of its parts, [n, parts] each.

    most_parts: an upper bound, so that no number of tokens needs another compilation.
    """
    tokens = len(partial.value)
    found = Largest.empty(partial.value, (tokens,), partial.sum_exp is not None)
    padded = triton.next_power_of_2(most_parts)
    _largest_of_tokens[(tokens,)](*partial, *found, parts, padded=padded)
    return found


def largest_in_torch(logits: Tensor, return_probs: bool = False) -> Largest:
    """The reference of `launch_largest`."""
    index = logits.argmax(dim=-1)
    value = logits.gather(1, index[:, None]).squeeze(1).float()
    sum_exp = (logits.float() - value[:, None]).exp_().sum(dim=-1) if return_probs else None
    return Largest(index, value, sum_exp)


# Triton takes annotations other than tl.constexpr for globals, and refuses them.
@triton.jit
def _largest_of_parts(  # type: ignore[no-untyped-def]
    logits,  # [n, V]
    indices,  # [n, parts] int64
    values,  # [n, parts] float32
    sum_exps,  # [n, parts] float32 or None
    stride,  # of a token
    size,  # V
    share,  # columns of a program
    columns: tl.constexpr,
):
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dst = token * tl.num_programs(1) + part
    first = part * share + tl.arange(0, columns)
    best = tl.full([columns], float("-inf"), tl.float32)  # of each lane
    where = first
    sum_exp = tl.zeros([columns], tl.float32)
    for start in range(0, share, columns):
        column = start + first
        logit = tl.load(logits + token * stride + column, column < size, float("-inf"))
        logit = logit.to(tl.float32)
        logit = tl.where(logit != logit, float("inf"), logit)
        if sum_exps is not None:
            ratio = tl.where(logit == best, 1.0, tl.exp(-tl.abs(logit - best)))
            sum_exp = tl.where(logit > best, sum_exp * ratio + 1.0, sum_exp + ratio)
        where = tl.where(logit > best, column, where)
        best = tl.maximum(best, logit)
    value = tl.max(best)
    tl.store(values + dst, value)
    tl.store(indices + dst, tl.min(tl.where(best == value, where, size)).to(tl.int64))
    if sum_exps is not None:
        sum_exp *= tl.where(best == value, 1.0, tl.exp(best - value))
        tl.store(sum_exps + dst, tl.sum(sum_exp))


@triton.jit(do_not_specialize=["parts"])
def _largest_of_tokens(  # type: ignore[no-untyped-def]
    indices,  # [n, parts] int64
    values,  # [n, parts] float32
    sum_exps,  # [n, parts] float32 or None
    index,  # [n] int64
    value,  # [n] float32
    sum_exp,  # [n] float32 or None
    parts,
    padded: tl.constexpr,
):
    token = tl.program_id(0)
    part = tl.arange(0, padded)
    src = token * parts + part
    each = tl.load(values + src, part < parts, float("-inf"))
    best = tl.max(each)
    first = tl.min(tl.where((each == best) & (part < parts), part, padded))
    tl.store(index + token, tl.load(indices + token * parts + first))
    tl.store(value + token, best)
    if sum_exps is not None:
        share = tl.load(sum_exps + src, part < parts, 0.0)
        tl.store(sum_exp + token, tl.sum(share * tl.where(each == best, 1.0, tl.exp(each - best))))
