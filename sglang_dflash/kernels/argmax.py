"""The largest logit of each row, read once at the speed of memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.cpu.argmax import argmax_on_cpu, largest_in_torch

COLUMNS = 4096  # of a row, looked at together
PROGRAMS = 1056  # at least, where rows are few: eight a multiprocessor of an H100


def argmax(logits: Tensor) -> Tensor:
    """Column of each row's largest logit, the lowest on a tie. [n, V] -> [n] int64."""
    return launch_largest(logits, weigh=False)[0] if logits.is_cuda else argmax_on_cpu(logits)


def largest(logits: Tensor, weigh: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of each row the column of the largest logit, that logit, and the sum of exp(logit - largest).

    logits: [n, V] of a float type, rows contiguous -> [n] int64, the lowest column on a tie, [n]
    float32, and [n] float32 where weighed, else None. NaN counts as infinity.
    """
    return (launch_largest if logits.is_cuda else largest_in_torch)(logits, weigh)


def launch_largest(logits: Tensor, weigh: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Programs share a row where rows are few; `cpu.argmax.largest_in_torch` is the twin."""
    rows, size = logits.shape
    assert logits.stride(1) == 1
    parts = min(triton.cdiv(size, COLUMNS), triton.cdiv(PROGRAMS, max(rows, 1)))
    share = triton.cdiv(size, parts * COLUMNS) * COLUMNS

    def room(*shape: int) -> tuple[Tensor, Tensor, Tensor | None]:
        made = (logits.new_empty(shape, dtype=torch.float32) for _ in range(1 + weigh))
        return logits.new_empty(shape, dtype=torch.int64), next(made), next(made, None)

    of_parts, found = room(rows, parts), room(rows)
    shape = {"columns": COLUMNS, "num_warps": 8}
    _largest_of_parts[(rows, parts)](logits, *of_parts, logits.stride(0), size, share, **shape)
    # As many as there can be, so that no number of rows compiles anew while requests wait.
    padded = triton.next_power_of_2(triton.cdiv(size, COLUMNS))
    _largest_of_rows[(rows,)](*of_parts, *found, parts, padded=padded)
    return found


# Annotations other than tl.constexpr are taken for globals, which Triton refuses.
@triton.jit
def _largest_of_parts(  # type: ignore[no-untyped-def]
    logits,  # [n, V]
    indices,  # [n, parts] int64
    values,  # [n, parts] float32
    masses,  # [n, parts] float32 or None
    stride,  # of a row
    size,  # V
    share,  # of a row that a program looks at
    columns: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    there = row * tl.num_programs(1) + part
    at = part * share + tl.arange(0, columns)
    best, where = tl.full([columns], float("-inf"), tl.float32), at  # of each lane
    mass = tl.zeros([columns], tl.float32)
    for start in range(0, share, columns):
        here = start + at
        logit = tl.load(logits + row * stride + here, here < size, float("-inf")).to(tl.float32)
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
def _largest_of_rows(  # type: ignore[no-untyped-def]
    indices,  # [n, parts] int64
    values,  # [n, parts] float32
    masses,  # [n, parts] float32 or None
    index,  # [n] int64
    value,  # [n] float32
    mass,  # [n] float32 or None
    parts,
    padded: tl.constexpr,
):
    row = tl.program_id(0)
    part = tl.arange(0, padded)
    here = row * parts + part
    each = tl.load(values + here, part < parts, float("-inf"))
    best = tl.max(each)
    first = tl.min(tl.where((each == best) & (part < parts), part, padded))
    tl.store(index + row, tl.load(indices + row * parts + first))
    tl.store(value + row, best)
    if masses is not None:
        share = tl.load(masses + here, part < parts, 0.0)
        tl.store(mass + row, tl.sum(share * tl.where(each == best, 1.0, tl.exp(each - best))))
