"""Torch versions, for the CPU, of functions that SGLang 0.5.13.post1 has only as compiled code."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.cpu.limits import KV_BYTES, set_limits
from sglang_dflash.seam.patched import temporarily

MANY_REQUESTS = 64  # that have recurrent states, unless the number is given


def limit_states(runner: Any, total_rest_memory: float) -> None:
    """BEFORE `ModelRunner.handle_max_mamba_cache`: at most KV_BYTES of recurrent states.

    A request has several slots if the radix cache is on.
    """
    args, state = runner.server_args, runner.mambaish_config.mamba2_cache_params.mamba_cache_per_req
    if runner.device != "cpu" or args.max_mamba_cache_size is not None:
        return
    slots = runner._calculate_mamba_ratio()
    requests = KV_BYTES // (state * slots)
    most = args.max_running_requests or MANY_REQUESTS
    args.max_mamba_cache_size = slots * max(1, min(most, requests))


def alloc_extend(
    allocator: Any,
    prefix_lens: Tensor,
    prefix_lens_cpu: Tensor,
    seq_lens: Tensor,
    seq_lens_cpu: Tensor,
    last_loc: Tensor,
    extend_num_tokens: int,
    num_new_pages: int | None = None,
) -> Tensor | None:
    """REPLACE `PagedTokenToKVPoolAllocator.alloc_extend`."""
    from sglang_dflash.cpu.v0_5_13.paged_growth import grow

    page = allocator.page_size
    growth = grow(prefix_lens_cpu.tolist(), seq_lens_cpu.tolist(), page)
    fresh = allocator.alloc(growth.num_pages * page)
    if fresh is None:
        return None
    slots = torch.nn.functional.pad(fresh, (1, 0))[torch.from_numpy(growth.page_slot + 1)]
    tail = last_loc.long()[torch.from_numpy(growth.request)] + torch.from_numpy(growth.tail_offset)
    return torch.where(torch.from_numpy(growth.in_tail), tail, slots)


def alloc_decode(
    allocator: Any, seq_lens: Tensor, seq_lens_cpu: Tensor, last_loc: Tensor
) -> Tensor | None:
    """REPLACE `PagedTokenToKVPoolAllocator.alloc_decode`: one token per request."""
    before = seq_lens_cpu - 1
    return alloc_extend(
        allocator, seq_lens - 1, before, seq_lens, seq_lens_cpu, last_loc, len(seq_lens_cpu)
    )


def tokens_of_requests(original: Callable[..., Tensor], batch: Any, device: Any = None) -> Tensor:
    """AROUND `generate_sequence_lengths` of LoRA's torch_native backend: [B] int32, on the host."""
    if batch.forward_mode.is_target_verify():
        return torch.tensor(batch.spec_info.lens, dtype=torch.int32)
    return original(batch, device)


def default_backend(server_args: Any) -> None:
    """BEFORE `ServerArgs._handle_cpu_backends`: torch_native, unless a backend is given.

    SGLang's default for attention, intel_amx, cannot verify a block and has no seeded draw. Its
    default for LoRA, csgmv, is Triton code. Convolution states get the dtype of the model: in bf16,
    SGLang would round them between two forwards.
    """
    if server_args.device != "cpu":
        return
    if server_args.attention_backend is None:
        server_args.attention_backend = "torch_native"
    if server_args.lora_backend == "csgmv":
        server_args.lora_backend = "torch_native"
    dtype = str(server_args.get_model_config().dtype).removeprefix("torch.")
    os.environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", dtype)


def seeded_draws(original: Callable[..., None], server_args: Any) -> None:
    """AROUND `ServerArgs._handle_deterministic_inference`: torch_native passes for triton there.

    SGLang has one list for DeepSeek's classes and another for all others, and one of them cannot be
    added to. torch_native computes each request by itself, so its results depend on no other.
    """
    if server_args.attention_backend != "torch_native":
        return original(server_args)
    with temporarily(server_args, attention_backend="triton"):
        return original(server_args)


def default_limits(_: None, server_args: Any) -> None:
    """AFTER `handle_speculative_decoding`."""
    if server_args.device == "cpu":
        set_limits(server_args, server_args.tp_size)
