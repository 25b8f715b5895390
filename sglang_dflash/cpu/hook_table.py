"""The hooks of a CPU that every release has, with the reason why each must exist."""

from __future__ import annotations

from sglang_dflash.seam.hook import Hook

EVERYWHERE = (
    Hook(
        "mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup",
        "REPLACE",
        "cpu.shims:no_kv_copy_kernel",
        "Triton kernel",
    ),
    Hook(
        "batch_invariant_ops.enable_batch_invariant_mode",
        "REPLACE",
        "cpu.shims:skip_batch_invariant_mode",
        "Triton kernels; a row's result on CPU is the same up to rounding",
    ),
)
