"""The attention kernels of FlashAttention 3 and FlashInfer in torch, as they are documented."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from test.rehearsal.device.memory import DeviceError

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
OUT_OF_FP8 = torch.bfloat16  # FlashAttention 3's output for queries in FP8; tests in fp32 change it


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, left: int, softcap: float
) -> tuple[Tensor, Tensor]:
    """Attention of the last q positions of one request, and [q, heads] its log-sum-exp.

    q: [q, heads, D]; k, v: [kv, kv_heads, D or D_v]. causal: aligned to the lower right; left: keys
    before a query that it sees, -1: all.
    """
    groups = q.shape[1] // k.shape[1]
    keys, values = (t.float().repeat_interleave(groups, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    at, key = torch.arange(len(k) - len(q), len(k))[:, None], torch.arange(len(k))
    if causal:
        scores.masked_fill_(key > at, float("-inf"))
    if left >= 0:
        scores.masked_fill_(key < at - left, float("-inf"))
    # A row that sees nothing is zero.
    probabilities = scores.softmax(dim=-1).nan_to_num_(0.0)
    return torch.einsum("hqk,khd->qhd", probabilities, values), scores.logsumexp(-1).T


def flash_attention_3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: None,
    v_new: None,
    q_v: Tensor | None,
    out: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    cu_seqlens_k_new: Tensor | None,
    seqused_q: None,
    seqused_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int | None,
    page_table: Tensor | None,
    kv_batch_idx: None,
    leftpad_k: None,
    rotary_cos: None,
    rotary_sin: None,
    seqlens_rotary: None,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    attention_chunk: int,
    softcap: float,
    is_rotary_interleaved: bool,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`sgl_kernel::fwd`. q: [n, heads, D]; k: [pages, page, kv_heads, D]; v: the same with D_v.

    Without a page table, k is [m, kv_heads, D], and `cu_seqlens_k` says whose keys they are.
    q_v: [n, heads, D_v], queries of latent attention that are compared with v.
    """
    assert not any((attention_chunk, k_new is not None, sinks is not None))
    if page_table is None:
        assert cu_seqlens_k is not None
        page_table, seqused_k, k, v = _in_pages(cu_seqlens_k, k, v)
    assert seqused_k is not None
    if q.dtype != k.dtype or q.dtype == torch.float8_e5m2:
        raise DeviceError(f"FlashAttention 3 has no kernel for {q.dtype} and {k.dtype}")
    ends, used, tables = cu_seqlens_q.tolist(), seqused_k.tolist(), page_table.long()
    page = k.shape[1]
    if ends[-1] > len(q):
        raise DeviceError(f"{ends[-1]} queries, but there are only {len(q)}")
    if scheduler_metadata is not None:
        expected = make_schedule(
            len(used),
            max_seqlen_q,
            tables.shape[1] * page,
            *(q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]),
            q.dtype,
            seqused_k,
            cu_seqlens_q,
            page=page,
            causal=is_causal,
            left=window_size_left,
            right=window_size_right,
            has_softcap=softcap > 0,
            num_splits=num_splits,
        )
        if not torch.equal(scheduler_metadata, expected):
            raise DeviceError("a schedule of other lengths, or of another shape")
    kind = OUT_OF_FP8 if q.dtype in FP8 else q.dtype
    made = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=kind) if out is None else out
    for i, length in enumerate(used):
        count = ends[i + 1] - ends[i]
        if count > max_seqlen_q:
            raise DeviceError(f"{count} queries, but max_seqlen_q is {max_seqlen_q}")
        pages = tables[i, : -(-length // page)]
        if len(pages) * page < length or bool((pages >= len(k)).any()):
            raise DeviceError(f"{length} keys behind a page table of {tables.shape[1]} pages")
        keys, values = (cache[pages].flatten(0, 1)[:length] for cache in (k, v))
        if k_descale is not None and v_descale is not None:  # [batch, kv_heads] float32
            keys, values = (
                keys.float() * k_descale[i, :, None],
                values.float() * v_descale[i, :, None],
            )
        rows = slice(ends[i], ends[i + 1])
        queries = q[rows]
        if q_v is not None:
            queries = torch.cat([queries, q_v[rows]], dim=-1)
            keys = torch.cat([keys, values], dim=-1)
        causal = is_causal or window_size_right == 0
        attended, _ = attend(
            queries, keys, values, softmax_scale, causal, window_size_left, softcap
        )
        made[rows] = attended.view_as(made[rows])
    nothing = torch.empty(0)
    return made, nothing, nothing, nothing


def _in_pages(ends: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Page table, lengths, keys and values in pages of one token. ends: [requests + 1]."""
    lens = ends.diff()
    table = ends[:-1, None] + torch.arange(int(lens.max()))
    return table.clamp_(max=len(k) - 1), lens, k[:, None], v[:, None]


def make_schedule(
    batch: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads: int,
    kv_heads: int,
    dim: int,
    dim_v: int,
    dtype: torch.dtype,
    lens: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: None = None,
    cu_seqlens_k_new: None = None,
    seqused_q: None = None,
    leftpad_k: None = None,
    page: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    left: int = -1,
    right: int = -1,
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    *_: Any,
) -> Tensor:
    """`sgl_kernel::get_scheduler_metadata`. torch leaves out arguments with the schema's default.

    The result has the size of FlashAttention's. Two results are equal only for equal arguments.
    """
    longest = max_seqlen_k if max_seqlen_q > 1 else None  # SGLang's own decode passes another value
    sizes = max_seqlen_q, longest, heads, kv_heads, dim, dim_v, page
    shape = hash((*sizes, causal, left, right, has_softcap, num_splits))
    made = torch.zeros(4 * (-(-batch // 4) * 4) + 1, dtype=torch.int32)
    made[:batch], made[-1] = lens, shape % 2**31
    return made


class FlashInferPrefill:
    """The compiled module `batch_prefill` of FlashInfer, for its FA2 or FA3 kernels."""

    def __init__(self, backend: str) -> None:
        self._caps = {"fa2": slice(8, 10), "fa3": slice(4, 6)}[backend]

    def plan(
        self,
        float_workspace: Tensor,
        int_workspace: Tensor,
        pinned_workspace: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_lens: Tensor,
        *_: Any,
    ) -> list[int]:
        """One copy brings the host's lengths to the device, where a graph reads them again."""
        if any(t.is_cuda for t in (qo_indptr, kv_indptr, kv_lens)):
            raise DeviceError("FlashInfer plans with host tensors")
        lens = torch.cat([qo_indptr.diff().long(), kv_lens.long()])
        pinned = pinned_workspace.view(torch.int64)[: len(lens)]
        pinned.copy_(lens)
        int_workspace.view(torch.int64)[: len(lens)].copy_(pinned, non_blocking=True)
        return [len(kv_lens)]

    def paged_run(
        self,
        float_workspace: Tensor,
        int_workspace: Tensor,
        plan: list[int],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_last_page_len: Tensor,
        out: Tensor,
        lse: Tensor | None,
        mask_mode: int,
        layout: int,
        window_left: int,
        enable_pdl: bool,
        *options: Any,
    ) -> None:
        """q: [n, heads, D]; k, v: [pages, page, kv_heads, D]."""
        softcap, scale = options[self._caps]
        starts, page = kv_indptr.tolist(), k.shape[1]

        def keys_of(i: int) -> tuple[Tensor, Tensor]:
            pages = kv_indices[starts[i] : starts[i + 1]].long()
            length = (len(pages) - 1) * page + int(kv_last_page_len[i]) if len(pages) else 0
            return k[pages].flatten(0, 1)[:length], v[pages].flatten(0, 1)[:length]

        how = mask_mode, layout, window_left, softcap, scale
        self._run(int_workspace, plan, q, qo_indptr, keys_of, out, lse, *how)

    def ragged_run(
        self,
        float_workspace: Tensor,
        int_workspace: Tensor,
        plan: list[int],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        out: Tensor,
        lse: Tensor | None,
        mask_mode: int,
        layout: int,
        window_left: int,
        enable_pdl: bool,
        *options: Any,
    ) -> None:
        """q: [n, heads, D]; k, v: [m, kv_heads, D]."""
        softcap, scale = options[self._caps]
        starts = kv_indptr.tolist()

        def keys_of(i: int) -> tuple[Tensor, Tensor]:
            rows = slice(starts[i], starts[i + 1])
            return k[rows], v[rows]

        how = mask_mode, layout, window_left, softcap, scale
        self._run(int_workspace, plan, q, qo_indptr, keys_of, out, lse, *how)

    def _run(
        self,
        int_workspace: Tensor,
        plan: list[int],
        q: Tensor,
        qo_indptr: Tensor,
        keys_of: Callable[[int], tuple[Tensor, Tensor]],
        out: Tensor,
        lse: Tensor | None,
        mask_mode: int,
        layout: int,
        window_left: int,
        softcap: float,
        scale: float,
    ) -> None:
        """mask_mode: 0 all see all, 1 causal; layout: 0 NHD."""
        assert (mask_mode in (0, 1), layout) == (True, 0)
        (count,) = plan
        planned = int_workspace.view(torch.int64)[: 2 * count].tolist()
        ends = qo_indptr.tolist()
        for i in range(count):
            keys, values = keys_of(i)
            found = ends[i + 1] - ends[i], max(1, len(keys))  # FlashInfer plans at least one key
            if found != (told := (planned[i], planned[count + i])):
                raise DeviceError(f"request {i} has {found} rows and keys, {told} were planned")
            rows = slice(ends[i], ends[i + 1])
            causal = mask_mode == 1
            out[rows], sums = attend(q[rows], keys, values, scale, causal, window_left, softcap)
            if lse is not None:
                lse[rows] = sums / math.log(2)


class FlashInferLatent:
    """The compiled module `batch_mla` of FlashInfer: latent attention with pages of any size."""

    def plan(
        self,
        float_workspace: Tensor,
        int_workspace: Tensor,
        pinned_workspace: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_lens: Tensor,
        heads: int,
        dim: int,
        causal: bool,
    ) -> list[int]:
        """One copy brings all of the host's numbers to the device. The kernel reads no others."""
        if any(t.is_cuda for t in (qo_indptr, kv_indptr, kv_lens)):
            raise DeviceError("FlashInfer plans with host tensors")
        count = len(kv_lens)
        told = torch.cat([qo_indptr[: count + 1], kv_indptr[: count + 1], kv_lens]).long()
        pinned = pinned_workspace.view(torch.int64)[: len(told)]
        pinned.copy_(told)
        int_workspace.view(torch.int64)[: len(told)].copy_(pinned, non_blocking=True)
        return [count]

    def run(
        self,
        float_workspace: Tensor,
        int_workspace: Tensor,
        plan: list[int],
        q: Tensor,
        q_pe: Tensor,
        ckv: Tensor,
        kpe: Tensor,
        kv_indices: Tensor,
        out: Tensor,
        lse: Tensor | None,
        mask_mode: int,
        heads: int,
        page: int,
        scale: float,
        base_e: bool,
    ) -> None:
        """q: [n, heads, D]; q_pe: [n, heads, R]; ckv: [pages, page, D]; kpe: [pages, page, R]."""
        assert (mask_mode in (0, 1), lse, ckv.shape[1]) == (True, None, page)
        (count,) = plan
        told = int_workspace.view(torch.int64)[: 3 * count + 2]
        rows, pages, lens = told.split([count + 1, count + 1, count])
        for i, length in enumerate(lens.tolist()):
            own = kv_indices[int(pages[i]) : int(pages[i + 1])].long()
            if len(own) != -(-length // page):
                raise DeviceError(f"{length} keys in {len(own)} pages of {page}")
            values, ropes = (cache[own].flatten(0, 1)[:length, None] for cache in (ckv, kpe))
            asked = slice(int(rows[i]), int(rows[i + 1]))
            queries = torch.cat([q[asked], q_pe[asked]], dim=-1)
            keys = torch.cat([values, ropes], dim=-1)
            out[asked], _ = attend(queries, keys, values, scale, mask_mode == 1, -1, 0.0)


def merge_state(
    v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor, v_merged: Tensor, s_merged: Tensor
) -> None:
    """FlashInfer's merge of attention over two parts of the keys, by their log-sum-exp (base 2)."""
    both = torch.stack([s_a, s_b])
    s_merged.copy_(both.mul(math.log(2)).logsumexp(0) / math.log(2))
    weight_a, weight_b = (both - s_merged).exp2().nan_to_num_(0.0)[..., None]
    v_merged.copy_(v_a * weight_a + v_b * weight_b)
