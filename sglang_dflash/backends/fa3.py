"""FlashAttention 3 over blocks: a graph fills its own tables, and all layers share a schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dflash.backends.page_tables import fill_tables


def skip_page_tables(
    original: Callable[..., None], backend: Any, *, forward_mode: Any, **given: Any
) -> None:
    """AROUND `FlashAttentionBackend._apply_cuda_graph_metadata`: a block's graph fills its tables.

    SGLang makes seven launches before each replay. It also sums lengths that FlashAttention reads
    only if it appends K/V.
    """
    ours = forward_mode.is_target_verify() and _serves_blocks(backend)
    if not ours or given["encoder_lens"] is not None:
        return original(backend, forward_mode=forward_mode, **given)
    bs = given["bs"]
    backend.forward_metadata = metadata = backend.target_verify_metadata[bs]
    most = int(given["seq_lens_cpu"][:bs].max()) + backend.speculative_num_draft_tokens
    room = metadata.page_table.shape[1] * backend.page_size
    assert most <= room, f"{most} tokens, and the page table has room for {room}"
    return None


def begin_forward(_: None, backend: Any, forward_batch: Any) -> None:
    """AFTER `FlashAttentionBackend.init_forward_metadata_in_graph`: fill tables, drop schedules.

    Schedules are an attribute of the tensor of lengths that they are made from. Every layer passes
    this tensor.
    """
    ours = forward_batch.forward_mode.is_target_verify() and _serves_blocks(backend)
    if not ours or forward_batch.encoder_lens is not None:
        return
    metadata = backend.forward_metadata
    fill_tables(
        backend.req_to_token,
        forward_batch.req_pool_indices,
        forward_batch.seq_lens,
        backend.speculative_num_draft_tokens,
        backend.page_size,
        metadata.cache_seqlens_int32,
        metadata.page_table,
        getattr(backend, "dflash_lens", None),
        metadata.cu_seqlens_q,
    )
    metadata.cache_seqlens_int32.dflash_schedules = {}


def begin_forward_of_chosen(_: None, backend: Any, forward_batch: Any) -> None:
    """AFTER `HybridAttnBackend.init_forward_metadata_in_graph`: call it on the chosen backend."""
    chosen = backend._select_backend(forward_batch.forward_mode)
    chosen.init_forward_metadata_in_graph(forward_batch)


def share_schedules(original: Any, *args: Any, **given: Any) -> Any:
    """AROUND `flash_attn_with_kvcache`: layers of one shape share a schedule inside a graph.

    Without it, each layer launches a kernel that divides the same lengths among the same programs.
    A sliding window has another division, which SGLang also leaves to the layer. MLA has a second
    query, for which the shape cannot be given here.

    SGLang closes every sliding window to the right. Only layers of a draft have a window and are
    not causal. They see the whole block, so their windows are opened.
    """
    left, _ = given.get("window_size", (-1, -1))
    if left >= 0 and not given.get("causal", False):
        given["window_size"] = left, -1
    schedules = getattr(given.get("cache_seqlens"), "dflash_schedules", None)
    if schedules is None or "qv" in given or left >= 0:
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
    return backend.topk <= 1 and not backend.use_sliding_window_kv_pool
