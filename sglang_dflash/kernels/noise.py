"""The noise of `method.noise` inside of kernels, and the noise of a few tokens by itself."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.method.noise import DraftNoise


# Triton takes annotations other than tl.constexpr for globals, and refuses them.
@triton.jit
def _mix(state, word):  # type: ignore[no-untyped-def]
    word *= 0xCC9E2D51
    word = ((word << 15) | (word >> 17)) * 0x1B873593
    state ^= word
    return ((state << 13) | (state >> 19)) * 5 + 0xE6546B64


@triton.jit
def hash_of_position(seed, position):  # type: ignore[no-untyped-def]
    """The part of the hash that all tokens of a position share: uint32.

    seed, position: int64 scalars or tiles.
    """
    state = _mix((seed * 0).to(tl.uint32), seed.to(tl.uint32))
    state = _mix(state, (seed >> 32).to(tl.uint32))
    return _mix(state, position.to(tl.uint32))


@triton.jit
def gumbel(state, token):  # type: ignore[no-untyped-def]
    """The noise of tokens: float32. state: of their positions; token: integers."""
    bits = _mix(state, token.to(tl.uint32)) ^ 16
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    bits ^= bits >> 16
    u = (bits.to(tl.int32, bitcast=True).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2**-32
    # Below 0, this is u - 1. log(1 + x) by its series, where 1 + x would lose the digits of x.
    series = u * (1 - u * (0.5 - u * (0.33333333 - u * (0.25 - u * 0.2))))
    of_large = tl.where(u > -0.03125, series, tl.log(1 + u))
    return -tl.log(-tl.where(u > 0, tl.log(tl.maximum(u, 1e-10)), of_large))


def launch_gumbel(noise: DraftNoise, ids: Tensor) -> Tensor:
    """The noise of a few tokens at each draft, as `DraftNoise.gumbel`: [B, M, k] float32.

    ids: [B, M, k] int64, contiguous.
    """
    requests, drafts, count = ids.shape
    assert ids.is_contiguous()
    numbers = ids.new_empty(ids.shape, dtype=noise.table.scores.dtype)
    _gumbel_of_tokens[(requests, drafts)](
        ids,
        noise.table.seeds,
        noise.rows,
        noise.positions,
        numbers,
        noise.positions.stride(0),
        noise.first,
        count=count,
        padded=triton.next_power_of_2(count),
        num_warps=1,
    )
    return numbers


def gumbel_in_torch(noise: DraftNoise, ids: Tensor) -> Tensor:
    """The reference of `launch_gumbel`."""
    return noise.gumbel(ids.shape[1], ids)


@triton.jit(do_not_specialize=["first"])
def _gumbel_of_tokens(  # type: ignore[no-untyped-def]
    ids,  # [B, M, k] int64
    seeds,  # [R] int64
    rows,  # [B]
    positions,  # [B] int64
    numbers,  # [B, M, k] float32
    positions_stride,
    first,
    count: tl.constexpr,
    padded: tl.constexpr,
):
    request, draft = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + request * positions_stride) + first + draft
    state = hash_of_position(tl.load(seeds + tl.load(rows + request)), position)
    column = tl.arange(0, padded)
    place = (request * tl.num_programs(1) + draft) * count + column
    token = tl.load(ids + place, column < count, 0)
    tl.store(numbers + place, gumbel(state, token), column < count)
