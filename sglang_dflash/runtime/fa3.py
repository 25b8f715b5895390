"""FlashAttention 3 over blocks: tables in one launch, and one schedule for all layers."""

from __future__ import annotations

from typing import Any

from sglang.srt.server_args import get_global_server_args

from sglang_dflash.kernels.tables import fill_tables


def tables_of_a_block(original: Any, backend: Any, *, forward_mode: Any, **given: Any) -> None:
    """AROUND `FlashAttentionBackend._apply_cuda_graph_metadata`: a block's tables in one launch.

    SGLang takes seven, and sums lengths that FlashAttention reads only where it appends K/V.
    """
    ours = forward_mode.is_target_verify() and _serves_blocks(backend)
    if not ours or given["encoder_lens"] is not None:
        return original(backend, forward_mode=forward_mode, **given)
    bs, width = given["bs"], backend.speculative_num_draft_tokens
    metadata = backend.target_verify_metadata[bs]
    metadata.max_seq_len_k = int(given["seq_lens_cpu"][:bs].max()) + width
    fill_tables(
        backend.req_to_token,
        given["req_pool_indices"][:bs],
        given["seq_lens"][:bs],
        width,
        backend.page_size,
        metadata.cache_seqlens_int32,
        metadata.page_table,
        metadata.max_seq_len_k,
    )
    backend.forward_metadata = metadata
    return None


def begin_schedules(_: None, backend: Any, forward_batch: Any) -> None:
    """AFTER `FlashAttentionBackend.init_forward_metadata_in_graph`: none of this forward is made.

    They lie on the lengths that they are made of, which every layer hands over.
    """
    if forward_batch.forward_mode.is_target_verify() and _serves_blocks(backend):
        backend.forward_metadata.cache_seqlens_int32.dflash_schedules = {}


def scheduled(original: Any, *args: Any, **given: Any) -> Any:
    """AROUND `flash_attn_with_kvcache`: layers of one shape share a schedule inside a graph.

    Without it each layer launches a kernel that divides the same lengths among the same programs.
    A sliding window has another division, which SGLang leaves to the layer as well; of MLA, which
    has a second query, no shape can be told.
    """
    schedules = getattr(given.get("cache_seqlens"), "dflash_schedules", None)
    if schedules is None or "qv" in given or given["window_size"] != (-1, -1):
        return original(*args, **given)
    q, k, v = (given[name] for name in ("q", "k_cache", "v_cache"))
    shape = {
        "num_heads": q.shape[-2],
        "num_heads_k": k.shape[-2],
        "headdim": q.shape[-1],
        "headdim_v": v.shape[-1],
        "qkv_dtype": q.dtype,
        "page_size": k.shape[1],
        "causal": given["causal"],
        "has_softcap": given["softcap"] > 0,
        "num_splits": given["num_splits"],
        "max_seqlen_q": given["max_seqlen_q"],
    }
    key = tuple(shape.values())
    if key not in schedules:
        from sgl_kernel.flash_attn import get_scheduler_metadata

        table = given["page_table"]
        schedules[key] = get_scheduler_metadata(
            batch_size=len(table),
            max_seqlen_k=table.shape[1] * k.shape[1],
            cache_seqlens=given["cache_seqlens"],
            cu_seqlens_q=given["cu_seqlens_q"],
            **shape,
        )
    return original(**given, scheduler_metadata=schedules[key])


def _serves_blocks(backend: Any) -> bool:
    """Whether a backend verifies chains of DFLASH over one KV pool."""
    dflash = get_global_server_args().speculative_algorithm == "DFLASH"
    return dflash and backend.topk <= 1 and not backend.use_sliding_window_kv_pool
