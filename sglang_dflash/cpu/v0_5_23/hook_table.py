"""Every hook that lets SGLang 0.5.23 run on a CPU, with the reason why it must exist."""

from __future__ import annotations

from typing import Any

from sglang_dflash.cpu.hook_table import EVERYWHERE
from sglang_dflash.seam.hook import Hook

CPU_HOOKS = (
    *EVERYWHERE,
    Hook(
        "mem_cache.allocation.assign_req_to_token_pool_func",
        "REPLACE",
        "cpu.v0_5_23.shims:assign_slots",
        "Triton kernel",
    ),
    Hook(
        "kernels.ops.sampling.murmur_hash.murmur_hash32",
        "REPLACE",
        "cpu.shims:murmur_hash32",
        "Triton kernel",
    ),
    *(
        Hook(
            f"managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.{function}",
            "AROUND",
            "cpu.v0_5_23.shims:without_cuda",
            "waits for CUDA",
        )
        for function in ("release_memory_occupation", "resume_memory_occupation")
    ),
)


def prepare() -> None:
    """Add the attention backend and the defaults of a CPU, where SGLang lets a plugin do it."""
    import torch
    from sglang.srt.arg_groups import choices
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from sglang_dflash.cpu.v0_5_23 import shims
    from sglang_dflash.cpu.v0_5_23.platform import BACKEND

    choices.add_draft_attention_backend_choices([BACKEND])
    choices.add_deterministic_attention_backend_choices([BACKEND])
    choices.add_radix_supported_deterministic_attention_backend_choices([BACKEND])
    register_resolution_hook("handle_cpu_backends")(shims.default_backend)
    register_resolution_hook("handle_speculative_decoding")(shims.default_limits)
    tensors: Any = torch.Tensor
    tensors.record_stream = shims.record_stream
    register_attention_backend(BACKEND)(shims.attention)
