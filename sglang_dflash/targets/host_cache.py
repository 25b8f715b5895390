"""SGLang's hierarchical cache: host memory behind the radix cache holds the draft's KV, too."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import AttachHiCacheStorageReqOutput
from sglang.srt.server_args import ServerArgs

from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.errors import BUILT_IN, Refusal
from sglang_dflash.settings.platforms import platform_of
from sglang_dflash.targets.hybrid import keeps_gdn_states

logger = logging.getLogger(__name__)

WITHOUT_HOST_CACHE = "Leave --enable-hierarchical-cache out."
STORAGE = (
    "SGLang reads and writes the draft's KV there only if it can, and serves a hit without it. "
    "Drafts would then be accepted less often, and nothing would say so."
)
TREES = ("SGLANG_ENABLE_UNIFIED_RADIX_TREE", "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE")


def copy_directly(server_args: ServerArgs) -> None:
    """BEFORE `ServerArgs._handle_hicache`: with fa3, copy KV by cudaMemcpyAsync.

    FlashAttention 3 decoding beside SGLang's copy kernels reads illegal addresses (SGLang #8991).
    SGLang therefore decodes with another backend. With DFLASH, decoding is draft and verify.
    """
    backends = {
        server_args.attention_backend,
        server_args.prefill_attention_backend,
        server_args.decode_attention_backend,
        server_args.speculative_draft_attention_backend,
    }
    kernels = server_args.enable_hierarchical_cache and server_args.hicache_io_backend == "kernel"
    if kernels and "fa3" in backends:
        server_args.hicache_io_backend = "direct"
        logger.warning(
            "DFLASH: --hicache-io-backend direct, because fa3 cannot run beside SGLang's copy "
            "kernels. It copies page by page, so give a --page-size of 32 or more."
        )


def check_host_cache(
    server_args: ServerArgs, model_config: ModelConfig, draft: DFlashConfig
) -> None:
    """Raise `Refusal` where hits in host memory would lack KV of the draft, or were not tested."""
    if not server_args.enable_hierarchical_cache:
        return
    target, platform = f"The target {server_args.model_path}", platform_of(server_args)
    layers = model_config.num_hidden_layers
    if not platform.host_cache:
        raise Refusal(
            f"--enable-hierarchical-cache does not work {platform.place}: SGLang's copies between "
            "host and device need a GPU.",
            WITHOUT_HOST_CACHE,
        )
    if server_args.hicache_storage_backend is not None:
        raise Refusal(
            f"DFLASH does not work with --hicache-storage-backend "
            f"{server_args.hicache_storage_backend}. {STORAGE}",
            f"Leave it out. The cache in host memory works without it. {BUILT_IN}",
        )
    if keeps_gdn_states(model_config) or model_config.is_hybrid_swa:
        kind = "recurrent states" if keeps_gdn_states(model_config) else "sliding-window layers"
        raise Refusal(
            f"{target} has {kind}. SGLang's hierarchical cache for such targets does not copy the "
            "draft's KV.",
            WITHOUT_HOST_CACHE,
        )
    if model_config.attention_arch == AttentionArch.MLA:
        raise Refusal(
            f"{target} uses latent attention (MLA), with which the hierarchical cache has not been "
            "compared.",
            WITHOUT_HOST_CACHE,
        )
    if draft.num_layers > layers:
        raise Refusal(
            f"The draft has {draft.num_layers} layers and the target {layers}. SGLang's "
            "hierarchical cache loads a layer of the draft with the same layer of the target, so "
            "the others would lack their KV.",
            WITHOUT_HOST_CACHE,
        )
    _check_transfers(server_args)


def _check_transfers(server_args: ServerArgs) -> None:
    layout, copies = server_args.hicache_mem_layout, server_args.hicache_io_backend
    if layout == "page_head" or copies == "kernel_ascend":
        raise Refusal(
            f"DFLASH has not been compared with --hicache-mem-layout {layout} and "
            f"--hicache-io-backend {copies}.",
            "Give --hicache-mem-layout layer_first, page_first or page_first_direct, and "
            "--hicache-io-backend kernel or direct.",
        )
    for name in TREES:
        if getattr(envs, name).get():
            raise Refusal(
                f"The radix tree of {name} has a hierarchical cache of its own, which does not "
                "copy the draft's KV.",
                f"Unset {name}, or leave --enable-hierarchical-cache out.",
            )
    if server_args.radix_cache_backend:
        raise Refusal(
            f"It is not known whether the cache of --radix-cache-backend "
            f"{server_args.radix_cache_backend} copies the draft's KV to host memory.",
            "Leave --radix-cache-backend or --enable-hierarchical-cache out.",
        )


def draft_kv_pool(
    original: Callable[..., Any], *, draft_worker: Any, spec_algorithm: Any, server_args: Any
) -> Any:
    """AROUND `kv_cache_builder.get_draft_kv_pool`: the draft's own KV pool and model config.

    SGLang takes the worker's `model_runner`, and that is the target's.
    """
    if draft_worker is None:
        return original(
            draft_worker=draft_worker, spec_algorithm=spec_algorithm, server_args=server_args
        )
    runner = draft_worker.draft_model_runner
    return runner.token_to_kv_pool, runner.model_config


def log_host_memory(
    _: None, *, tree_cache: Any, spec_algorithm: Any, enable_hierarchical_cache: bool, **__: Any
) -> None:
    """AFTER `kv_cache_builder.maybe_register_hicache_draft`: the host memory of both pools.

    SGLang's flags size the target's pool. The draft's has as many slots.
    """
    if not enable_hierarchical_cache:
        return
    controller = tree_cache.cache_controller
    assert controller.has_draft, "SGLang did not register the draft's KV pool"
    pools = controller.mem_pool_host, controller.mem_pool_host_draft
    target, draft = (pool.size * pool.size_per_token / 1e9 for pool in pools)
    logger.info(
        f"DFLASH: the hierarchical cache takes {target:.3g} GB of host memory per rank for the "
        f"target's KV and {draft:.3g} GB more for the draft's."
    )


def refuse_storage(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """AROUND `Scheduler.attach_hicache_storage_wrapped`: refuse storage for a running server."""
    return AttachHiCacheStorageReqOutput(
        success=False, message=f"DFLASH does not work with a storage backend. {STORAGE}"
    )
