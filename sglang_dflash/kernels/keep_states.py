"""Recurrent states after a verify: a request keeps those behind its last accepted token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def launch_keep_states(
    states: Tensor, snapshots: Tensor, slots: Tensor, rows: Tensor, num_accepted: Tensor
) -> None:
    """Copy one snapshot of each request to its slot, in every layer.

    states: [L, S, ..], a state per slot; snapshots: [L, >= B, >= w, ..] of the same dtype, the
    state behind each position of a block, by the request's place in the batch; slots: [R] int32,
    the slot of each request row; rows: [B] int64, the request rows; num_accepted: [B] int64 in
    0..w-1. A state is contiguous. One program per request, layer and BLOCK values.
    """
    layers, size = len(states), states[0, 0].numel()
    assert states[0, 0].is_contiguous()
    assert snapshots[0, 0, 0].is_contiguous()
    assert states.dtype == snapshots.dtype
    _keep[(len(rows), layers, triton.cdiv(size, BLOCK))](
        states,
        snapshots,
        slots,
        rows,
        num_accepted,
        states.stride(0),
        states.stride(1),
        snapshots.stride(0),
        snapshots.stride(1),
        snapshots.stride(2),
        num_accepted.stride(0),
        size,
        block=BLOCK,
    )


def keep_states_in_torch(
    states: Tensor, snapshots: Tensor, slots: Tensor, rows: Tensor, num_accepted: Tensor
) -> None:
    """The twin of `launch_keep_states`."""
    request = torch.arange(len(rows), device=rows.device)
    states[:, slots[rows].long()] = snapshots[:, request, num_accepted]


# Triton takes annotations other than tl.constexpr for globals, and refuses them.
@triton.jit(do_not_specialize=["accepted_stride"])
def _keep(  # type: ignore[no-untyped-def]
    states,  # [L, S, ..]
    snapshots,  # [L, >= B, >= w, ..]
    slots,  # [R] int32
    rows,  # [B] int64
    num_accepted,  # [B] int64
    layer_stride,
    slot_stride,
    snapshot_layer_stride,
    snapshot_request_stride,
    snapshot_step_stride,
    accepted_stride,
    size,
    block: tl.constexpr,
):
    request, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at = tl.program_id(2) * block + tl.arange(0, block)
    slot = tl.load(slots + tl.load(rows + request)).to(tl.int64)
    step = tl.load(num_accepted + request * accepted_stride)
    source = snapshots + layer * snapshot_layer_stride + request * snapshot_request_stride
    kept = tl.load(source + step * snapshot_step_stride + at, at < size)
    tl.store(states + layer * layer_stride + slot * slot_stride + at, kept, at < size)
