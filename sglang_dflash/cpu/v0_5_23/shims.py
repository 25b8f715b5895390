"""Torch versions, for the CPU, of what SGLang 0.5.23 has only as Triton kernels, and its limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.cpu.limits import set_limits
from sglang_dflash.cpu.v0_5_23.platform import BACKEND
from sglang_dflash.seam.patched import temporarily
from sglang_dflash.seam.resolving import Arguments


def assign_slots(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    batch_size: int,
) -> None:
    """REPLACE `assign_req_to_token_pool_func`: row i, columns start[i] to end[i], in order."""
    slots = out_cache_loc.split((end_offset - start_offset).tolist())
    rows, starts, ends = (t.tolist() for t in (req_pool_indices, start_offset, end_offset))
    for row, start, end, part in zip(rows, starts, ends, slots, strict=True):
        req_to_token[row, start:end] = part


def without_cuda(original: Callable[..., Any], *args: Any) -> Any:
    """AROUND what asks torch for its one accelerator, which is CUDA in torch's own packages."""
    with temporarily(torch, get_device_module=lambda *_: torch.cpu):
        return original(*args)


def default_backend(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Around `handle_cpu_backends`: default attention needs AMX, and LoRA is Triton code."""
    arguments = Arguments(server_args)
    if arguments.attention_backend is None:
        arguments.attention_backend = BACKEND
    if arguments.lora_backend == "csgmv":
        arguments.lora_backend = BACKEND
    previous(server_args)


def default_limits(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Around `handle_speculative_decoding`."""
    previous(server_args)
    arguments = Arguments(server_args)
    set_limits(arguments, arguments.tp_size * arguments.dp_size)


def record_stream(tensor: Tensor, stream: Any) -> None:
    """In place of `Tensor.record_stream`, which a tensor on a CPU refuses: it has no streams."""


def attention(runner: Any) -> Any:
    """The attention backend `torch_native`, of which SGLang's own does not verify blocks."""
    from sglang_dflash.cpu.attention import TorchAttention

    return TorchAttention(runner)
