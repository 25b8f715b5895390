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

    column: Tensor  # int64, the lowest one on a tie
    value: Tensor  # float32
    mass: Tensor | None  # float32, the sum of exp(logit - largest); 1 / mass is its probability

    @classmethod
    def empty(cls, logits: Tensor, shape: tuple[int, ...], weigh: bool) -> Largest:
        """Fields of this shape, where the logits are."""
        value = logits.new_empty(shape, dtype=torch.float32)
        mass = torch.empty_like(value) if weigh else None
        return cls(logits.new_empty(shape, dtype=torch.int64), value, mass)


def launch_largest(logits: Tensor, weigh: bool = False) -> Largest:
    """Find the largest logit of each token.

    logits: [n, V] of a float type, the last dimension contiguous; weigh: compute the mass, too. NaN
    counts as infinity. If there are few tokens, several programs share the logits of each.
    """
    tokens, size = logits.shape
    assert logits.stride(1) == 1
    parts = min(triton.cdiv(size, COLUMNS), triton.cdiv(PROGRAMS, max(tokens, 1)))
    share = triton.cdiv(size, parts * COLUMNS) * COLUMNS
    partial = Largest.empty(logits, (tokens, parts), weigh)
    _largest_of_parts[(tokens, parts)](
        logits, *partial, logits.stride(0), size, share, columns=COLUMNS, num_warps=8
    )
    return reduce_parts(partial, parts, triton.cdiv(size, COLUMNS))


def reduce_parts(partial: Largest, parts: int, most_parts: int) -> Largest:
    """The largest logit of each token, [n] per field, from those of its parts, [n, parts] each.

    most_parts: an upper bound, so that no number of tokens needs another compilation.
    """
    tokens = len(partial.value)
    found = Largest.empty(partial.value, (tokens,), partial.mass is not None)
    padded = triton.next_power_of_2(most_parts)
    _largest_of_tokens[(tokens,)](*partial, *found, parts, padded=padded)
    return found


def largest_in_torch(logits: Tensor, weigh: bool = False) -> Largest:
    """The twin of `launch_largest`."""
    column = logits.argmax(dim=-1)
    value = logits.gather(1, column[:, None]).squeeze(1).float()
    mass = (logits.float() - value[:, None]).exp_().sum(dim=-1) if weigh else None
    return Largest(column, value, mass)


# Triton takes annotations other than tl.constexpr for globals, and refuses them.
@triton.jit
def _largest_of_parts(  # type: ignore[no-untyped-def]
    logits,  # [n, V]
    indices,  # [n, parts] int64
    values,  # [n, parts] float32
    masses,  # [n, parts] float32 or None
    stride,  # of a token
    size,  # V
    share,  # columns of a program
    columns: tl.constexpr,
):
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    there = token * tl.num_programs(1) + part
    at = part * share + tl.arange(0, columns)
    best, where = tl.full([columns], float("-inf"), tl.float32), at  # of each lane
    mass = tl.zeros([columns], tl.float32)
    for start in range(0, share, columns):
        here = start + at
        logit = tl.load(logits + token * stride + here, here < size, float("-inf")).to(tl.float32)
        logit = tl.where(logit != logit, float("inf"), logit)
        if masses is not None:
            ratio = tl.where(logit == best, 1.0, tl.exp(-tl.abs(logit - best)))
            mass = tl.where(logit > best, mass * ratio + 1.0, mass + ratio)
        where = tl.where(logit > best, here, where)
        best = tl.maximum(best, logit)
    value = tl.max(best)
    tl.store(values + there, value)
    tl.store(indices + there, tl.min(tl.where(best == value, where, size)).to(tl.int64))
    if masses is not None:
        mass *= tl.where(best == value, 1.0, tl.exp(best - value))
        tl.store(masses + there, tl.sum(mass))


@triton.jit(do_not_specialize=["parts"])
def _largest_of_tokens(  # type: ignore[no-untyped-def]
    indices,  # [n, parts] int64
    values,  # [n, parts] float32
    masses,  # [n, parts] float32 or None
    index,  # [n] int64
    value,  # [n] float32
    mass,  # [n] float32 or None
    parts,
    padded: tl.constexpr,
):
    token = tl.program_id(0)
    part = tl.arange(0, padded)
    here = token * parts + part
    each = tl.load(values + here, part < parts, float("-inf"))
    best = tl.max(each)
    first = tl.min(tl.where((each == best) & (part < parts), part, padded))
    tl.store(index + token, tl.load(indices + token * parts + first))
    tl.store(value + token, best)
    if masses is not None:
        share = tl.load(masses + here, part < parts, 0.0)
        tl.store(mass + token, tl.sum(share * tl.where(each == best, 1.0, tl.exp(each - best))))
