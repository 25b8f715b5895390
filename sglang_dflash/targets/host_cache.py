"""SGLang's hierarchical cache: host memory below the radix cache holds the draft's KV, too."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import AttachHiCacheStorageReqOutput
from sglang.srt.server_args import ServerArgs

from sglang_dflash.errors import BUILT_IN, Rule, refuse
from sglang_dflash.settings.facts import DraftFacts
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


def _other_tree(facts: DraftFacts) -> str:
    """The variable that asks for a radix tree with a hierarchical cache of its own."""
    return next((name for name in TREES if getattr(envs, name).get()), "")


def _untested_copies(facts: DraftFacts) -> bool:
    args = facts.args
    unknown = args.hicache_mem_layout == "page_head", args.hicache_io_backend == "kernel_ascend"
    return any(unknown)


# Of servers with --enable-hierarchical-cache: where hits in host memory would lack KV of the draft.
RULES: tuple[Rule[DraftFacts], ...] = (
    Rule(
        "`--enable-hierarchical-cache` on a CPU",
        lambda f: not f.platform.host_cache,
        "--enable-hierarchical-cache does not work {f.platform.place}: SGLang's copies between "
        "host and device need a GPU.",
        WITHOUT_HOST_CACHE,
    ),
    Rule(
        "`--hicache-storage-backend`",
        lambda f: f.args.hicache_storage_backend is not None,
        "DFLASH does not work with --hicache-storage-backend {f.args.hicache_storage_backend}. "
        + STORAGE,
        f"Leave it out. The cache in host memory works without it. {BUILT_IN}",
    ),
    Rule(
        "`--enable-hierarchical-cache`, hybrid targets",
        lambda f: keeps_gdn_states(f.target),
        "The target {f.args.model_path} has recurrent states. SGLang's hierarchical cache for such "
        "targets does not copy the draft's KV.",
        WITHOUT_HOST_CACHE,
    ),
    Rule(
        "`--enable-hierarchical-cache`, targets with two KV pools (sliding windows)",
        lambda f: f.target.is_hybrid_swa,
        "The target {f.args.model_path} has sliding-window layers. SGLang's hierarchical cache for "
        "such targets does not copy the draft's KV.",
        WITHOUT_HOST_CACHE,
    ),
    Rule(
        "`--enable-hierarchical-cache`, targets with latent attention (MLA)",
        lambda f: f.target.attention_arch == AttentionArch.MLA,
        "The target {f.args.model_path} uses latent attention (MLA), with which the hierarchical "
        "cache has not been compared.",
        WITHOUT_HOST_CACHE,
    ),
    Rule(
        "`--enable-hierarchical-cache`, drafts with more layers than the target",
        lambda f: f.draft.num_layers > f.target.num_hidden_layers,
        "The draft has {f.draft.num_layers} layers and the target {f.target.num_hidden_layers}. "
        "SGLang's hierarchical cache loads a layer of the draft with the same layer of the target.",
        WITHOUT_HOST_CACHE,
    ),
    Rule(
        "`--hicache-mem-layout page_head`, `--hicache-io-backend kernel_ascend`",
        _untested_copies,
        "DFLASH has not been compared with --hicache-mem-layout {f.args.hicache_mem_layout} and "
        "--hicache-io-backend {f.args.hicache_io_backend}.",
        "Give --hicache-mem-layout layer_first, page_first or page_first_direct, and "
        "--hicache-io-backend kernel or direct.",
    ),
    Rule(
        f"`--enable-hierarchical-cache` with {' or '.join(TREES)}",
        _other_tree,
        "The radix tree of {found} has a hierarchical cache of its own, which does not copy the "
        "draft's KV.",
        "Unset {found}, or leave --enable-hierarchical-cache out.",
    ),
    Rule(
        "`--enable-hierarchical-cache` with `--radix-cache-backend`",
        lambda f: f.args.radix_cache_backend,
        "It is not known whether the cache of --radix-cache-backend {f.args.radix_cache_backend} "
        "copies the draft's KV to host memory.",
        "Leave --radix-cache-backend or --enable-hierarchical-cache out.",
    ),
)


def check_host_cache(facts: DraftFacts) -> None:
    """Raise `Refusal` where hits in host memory would lack KV of the draft, or were not tested."""
    if facts.args.enable_hierarchical_cache:
        refuse(RULES, facts)


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
