"""Torch versions, for the CPU, of functions that SGLang has only as Triton or compiled code."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sglang_dflash.seam.flags import is_dflash
from sglang_dflash.seam.patched import temporarily

logger = logging.getLogger(__name__)

KV_BYTES = 2 * 10**9  # default bound of both KV pools together, all ranks
MANY_REQUESTS = 64  # that have recurrent states, unless the number is given
KV_ITEMSIZE = {"bf16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}  # of a target; else its own


def no_kv_copy_kernel(pool: Any) -> None:
    """REPLACE `MHATokenToKVPool._init_kv_copy_and_warmup`: nothing moves KV on this path."""
    pool._kv_copy_config = None


def plain_rope(
    original: Any,
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: int,
    is_neox_style: bool = True,
    rope_scaling: dict[str, Any] | None = None,
    *args: Any,
) -> Any:
    """AROUND `get_rope_cpu`, which knows only DeepSeek's YaRN: plain RoPE as everywhere else."""
    from sglang.srt.layers.rotary_embedding import get_rope

    make = get_rope if rope_scaling is None else original
    shape = (head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling)
    return make(*shape, *(args[:2] if rope_scaling is None else args))


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


class _Unpinned(TorchFunctionMode):
    """Torch functions make tensors in pageable memory, whatever they are asked for."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.pin_memory:
            return args[0]
        return func(*args, **{k: v for k, v in (kwargs or {}).items() if k != "pin_memory"})


def without_pinning(original: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND what LoRA pins. To pin memory, torch needs a GPU's driver."""
    with _Unpinned():
        return original(*args, **kwargs)


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
    from sglang_dflash.cpu.paged_growth import grow

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


def apply_vocab_mask(original: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND the grammars' `apply_vocab_mask(logits, vocab_mask)`, which has no CPU branch.

    logits: [n, V]; vocab_mask: [n, ceil(V / 32)] int32, bit i of word w allows token 32 w + i.
    """
    logits, mask = args[-2:] if len(args) >= 2 else (kwargs["logits"], kwargs["vocab_mask"])
    if logits.device.type != "cpu":
        original(*args, **kwargs)
        return
    bits = (mask[:, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
    logits.masked_fill_(bits.flatten(1)[:, : logits.shape[1]] == 0, float("-inf"))


def murmur_hash32(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """REPLACE SGLang's Triton kernel of the same name, bit for bit.

    MurmurHash3 (x86, 32 bit) of the four words seed low, seed high, position, column. seed,
    positions: [n] integers; col_indices: [m] integers. Returns [n, m] uint32.
    """
    mask = 0xFFFFFFFF

    def mix(h: Tensor, k: Tensor) -> Tensor:
        k = _times(k, 0xCC9E2D51)
        k = _times((k << 15 | k >> 17) & mask, 0x1B873593)
        h = h ^ k
        return (_times((h << 13 | h >> 19) & mask, 5) + 0xE6546B64) & mask

    seed = seed.view(torch.int64)[:, None]
    words = (seed & mask, seed >> 32 & mask, positions.long()[:, None] & mask)
    h = torch.zeros_like(seed)
    for word in (*words, col_indices.long()[None] & mask):
        h = mix(h, word)
    h = h ^ 16
    h = _times(h ^ h >> 16, 0x85EBCA6B)
    h = _times(h ^ h >> 13, 0xC2B2AE35)
    return (h ^ h >> 16).to(torch.uint32)


def _times(x: Tensor, factor: int) -> Tensor:
    """x * factor mod 2**32, in int64 without overflow. x: int64 below 2**32."""
    low, high = factor & 0xFFFF, factor >> 16
    return (x * low + ((x * high & 0xFFFF) << 16)) & 0xFFFFFFFF


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


def skip_batch_invariant_mode() -> None:
    """REPLACE `enable_batch_invariant_mode`, which registers Triton kernels."""


def default_limits(_: None, server_args: Any) -> None:
    """AFTER `handle_speculative_decoding`: limits that a machine without a GPU needs.

    KV memory defaults to what the requests can use, at most 2 GB for both pools. The ranks of
    tensor parallelism share the cores, so they do not need a NUMA node each.
    """
    if server_args.device != "cpu":
        return
    if not server_args.enable_torch_compile:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # SGLang's helpers would need a C++ compiler
    if server_args.tp_size > 1:
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", _split_cores(server_args.tp_size))
        os.environ.setdefault("SGLANG_NCCL_SO_PATH", os.path.join(os.sep, "nonexistent", "nccl"))
    config = server_args.get_model_config()
    if server_args.max_total_tokens is None:
        bound = _bytes_bound(server_args)
        if server_args.max_running_requests is not None:
            bound = min(bound, server_args.max_running_requests * config.context_len)
        page = server_args.page_size
        server_args.max_total_tokens = max(page, bound // page * page)
        logger.info(
            "CPU: --max-total-tokens %d (at most %d GB of KV); give the flag to change it.",
            server_args.max_total_tokens,
            KV_BYTES // 10**9,
        )


def _bytes_bound(server_args: Any) -> int:
    """The number of tokens whose KV, of target and draft, fits into KV_BYTES."""
    from sglang.srt.configs.model_config import AttentionArch

    config = server_args.get_model_config()
    if config.attention_arch == AttentionArch.MLA:  # every rank keeps the whole latent vector
        values = server_args.tp_size * (config.kv_lora_rank + config.qk_rope_head_dim)
    else:
        values = config.get_total_num_kv_heads() * (config.head_dim + config.v_head_dim)
    itemsize = KV_ITEMSIZE.get(server_args.kv_cache_dtype, config.dtype.itemsize)
    per_token = config.num_hidden_layers * values * itemsize
    if is_dflash(server_args):
        from sglang_dflash.checkpoint.served import draft_config

        draft = draft_config(server_args)
        per_token += draft.kv_bytes_per_token(config.dtype.itemsize)
    return int(KV_BYTES // per_token)


def _split_cores(ranks: int) -> str:
    """Cores of each rank, "0|1" for two ranks on two cores. Ranks share cores if there are few."""
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // ranks)
    return "|".join(
        ",".join(str(cores[(rank * each + i) % len(cores)]) for i in range(each))
        for rank in range(ranks)
    )
