"""Every hook that lets SGLang 0.5.13.post1 run on a CPU, with the reason why it must exist."""

from __future__ import annotations

import os

from sglang_dflash.cpu.hook_table import EVERYWHERE
from sglang_dflash.seam.hook import Hook

CPU_HOOKS = (
    *EVERYWHERE,
    Hook(
        "model_executor.model_runner.ModelRunner._get_attention_backend_from_str",
        "AROUND",
        "cpu.v0_5_13.backends:attention_backend",
        "SGLang's torch_native pads queries and does not support TARGET_VERIFY",
    ),
    Hook(
        "model_executor.model_runner.ModelRunner.handle_max_mamba_cache",
        "BEFORE",
        "cpu.v0_5_13.shims:limit_states",
        "SGLang sizes recurrent states for a GPU",
    ),
    Hook(
        "mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.alloc_extend",
        "REPLACE",
        "cpu.v0_5_13.shims:alloc_extend",
        "Triton kernel",
    ),
    Hook(
        "mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.alloc_decode",
        "REPLACE",
        "cpu.v0_5_13.shims:alloc_decode",
        "Triton kernel",
    ),
    Hook(
        "lora.backend.torch_backend.generate_sequence_lengths",
        "AROUND",
        "cpu.v0_5_13.shims:tokens_of_requests",
        "SGLang gives each request of a verify the same number of tokens",
    ),
    Hook(
        "constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask",
        "AROUND",
        "cpu.shims:apply_vocab_mask",
        "no CPU branch",
    ),
    Hook(
        "distributed.parallel_state.GroupCoordinator.all_gather_into_tensor",
        "REPLACE",
        "cpu.v0_5_13.dp_attention:gather_into",
        "registered for GPUs only",
    ),
    Hook(
        "distributed.parallel_state.GroupCoordinator.reduce_scatter_tensor",
        "REPLACE",
        "cpu.v0_5_13.dp_attention:scatter_sum",
        "registered for GPUs only",
    ),
    Hook(
        "layers.dp_attention.memcpy_triton",
        "REPLACE",
        "cpu.v0_5_13.dp_attention:copy_rows",
        "Triton kernel",
    ),
    Hook(
        "model_executor.model_runner.adjust_config_with_unaligned_cpu_tp",
        "AROUND",
        "cpu.v0_5_13.dp_attention:divided_heads",
        "divides heads by all ranks",
    ),
    Hook(
        "model_executor.forward_batch_info.ForwardBatch.prepare_mlp_sync_batch",
        "AROUND",
        "cpu.shims:without_pinning",
        "pins memory",
    ),
    Hook(
        "server_args.ServerArgs._handle_cpu_backends",
        "BEFORE",
        "cpu.v0_5_13.shims:default_backend",
        "SGLang's default backend needs AMX and cannot verify",
    ),
    Hook(
        "server_args.ServerArgs._handle_deterministic_inference",
        "AROUND",
        "cpu.v0_5_13.shims:seeded_draws",
        "SGLang's lists of backends whose draws may be seeded lack torch_native",
    ),
    Hook(
        "layers.utils.hash.murmur_hash32",
        "REPLACE",
        "cpu.shims:murmur_hash32",
        "Triton kernel",
    ),
    Hook(
        "arg_groups.speculative_hook.handle_speculative_decoding",
        "AFTER",
        "cpu.v0_5_13.shims:default_limits",
        "SGLang sizes KV for a GPU and needs a NUMA node per rank",
    ),
)


def prepare() -> None:
    """Choose SGLang's CPU engine, before any child starts."""
    from sglang.srt.utils import common

    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    common.is_cpu.cache_clear()
