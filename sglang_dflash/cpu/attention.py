"""The `torch_native` attention backend, without padded queries.

SGLang's own class pads the queries of a request to its whole length, and looks up a request's slots
again in every layer. Here a forward is planned once, and only real queries are computed. The same
class serves prefill, decode, the draft's block (no mask) and the target's (causal, lower right).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.functional import scaled_dot_product_attention as attend

FEW = 32  # up to so many queries, all heads of a KV head are computed in one product


@dataclass(frozen=True)
class View:
    """The keys that the queries of a layer may see."""

    causal: bool
    left: int | None  # tokens before a query that it sees, None: all
    anchor_window: int | None  # tokens before the first query that all see, None: no limit

    @classmethod
    def of(cls, layer: RadixAttention) -> View:
        anchor_window = getattr(layer, "dflash_anchor_window", None)
        window = layer.sliding_window_size
        sliding = window is not None and window > -1 and anchor_window is None
        return cls(
            causal=layer.attn_type != AttentionType.ENCODER_ONLY,
            left=window if sliding else None,
            anchor_window=anchor_window,
        )


@dataclass(frozen=True)
class Segment:
    """One request in a forward: q queries at the end of kv keys."""

    queries: int
    slots: Tensor  # [kv] int64

    @property
    def few(self) -> bool:
        """Whether the queries that share a KV head are rows of one product.

        This is a third faster for a few tokens, and gains nothing for one token. For many tokens,
        the kernel is faster with one head at a time, and without a mask if possible.
        """
        return 1 < self.queries <= FEW

    def mask(self, view: View, groups: int, dtype: torch.dtype) -> Tensor | None:
        """0 or -inf, [q, kv], with `few` [q * groups, kv]; None: all see all, or a triangle.

        With a mask of bools, the kernel would convert it to this form in every layer.
        """
        triangle = view.causal and view.left is None and view.anchor_window is None
        if triangle and not self.few and self.queries in (1, len(self.slots)):
            return None
        seen = self._seen(view)
        if seen is None:
            return None
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
        return mask.repeat_interleave(groups, dim=0) if self.few else mask

    def _seen(self, view: View) -> Tensor | None:
        q, kv = self.queries, len(self.slots)
        if view.left is None and view.anchor_window is None and not view.causal:
            return None
        at, key = torch.arange(kv - q, kv)[:, None], torch.arange(kv)
        seen = key <= at if view.causal else torch.ones(q, kv, dtype=torch.bool)
        if view.left is not None:
            seen = seen & (key >= at - view.left)
        if view.anchor_window is not None:
            seen = seen & (key >= kv - q - view.anchor_window)
        return seen


def queries_of(forward_batch: ForwardBatch) -> list[int]:
    """The number of tokens of each request in a forward."""
    requests = forward_batch.batch_size
    if forward_batch.forward_mode.is_target_verify():
        block = forward_batch.spec_info  # SGLang's own has the same width in every request
        lens = list(getattr(block, "lens", []))  # with DP attention, padded requests come after
        return lens + [block.draft_token_num] * (requests - len(lens))
    if forward_batch.forward_mode.is_decode():
        return [1] * requests
    return list(forward_batch.extend_seq_lens_cpu)


class TorchAttention(TorchNativeAttnBackend):
    """Keeps the name `torch_native`, because SGLang picks torch helper functions by it."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._latent = isinstance(self.token_to_kv_pool, MLATokenToKVPool)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The context of a padded request, with DP attention."""
        return 0

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        if forward_batch.forward_mode.is_idle():  # its layers are skipped
            return
        queries, lengths = queries_of(forward_batch), forward_batch.seq_lens.tolist()
        if forward_batch.forward_mode.is_target_verify():  # the block comes after
            lengths = [p + q for p, q in zip(lengths, queries, strict=True)]
        table = self.req_to_token_pool.req_to_token
        rows = forward_batch.req_pool_indices.tolist()
        self._segments = [
            Segment(q, table[row, :kv].long())
            for row, q, kv in zip(rows, queries, lengths, strict=True)
        ]
        self._masks: dict[tuple[View, int, torch.dtype], list[Tensor | None]] = {}

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> Tensor:
        """q: [n, heads * D] -> [n, heads * D_v]; K/V of the same tokens are stored first."""
        if layer.is_cross_attention or forward_batch.encoder_lens is not None:
            output: Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
            return output
        if save_kv_cache and k is not None:
            where = {"swa_loc": self.swa_out_cache_loc} if self.use_sliding_window_kv_pool else {}
            scales = () if self._latent else (layer.k_scale, layer.v_scale)
            to = forward_batch.out_cache_loc
            self.token_to_kv_pool.set_kv_buffer(layer, to, k, v, *scales, **where)
        groups = layer.tp_q_head_num // layer.tp_k_head_num
        query = q.view(-1, layer.tp_k_head_num, groups, layer.qk_head_dim)
        tokens = sum(segment.queries for segment in self._segments)
        padded_rows = len(query) - tokens  # with DP attention
        query = (
            query[:tokens].transpose(0, 1).flatten(1, 2).unsqueeze(0)
        )  # [1, kv_heads, n * groups, D]
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        view, attended = View.of(layer), []
        each = query.split([segment.queries * groups for segment in self._segments], dim=2)
        masks = self._masks_of(view, groups, q.dtype)
        for segment, rows, mask in zip(self._segments, each, masks, strict=True):
            # index_select is several times as fast as keys[slots]
            key, value = keys.index_select(0, segment.slots), values.index_select(0, segment.slots)
            if key.dtype != q.dtype:
                key = _as_computed(key, layer.k_scale, q.dtype)
                value = _as_computed(value, layer.v_scale, q.dtype)
            key, value = key.transpose(0, 1).unsqueeze(0), value.transpose(0, 1).unsqueeze(0)
            if segment.few:
                some = attend(rows, key, value, attn_mask=mask, scale=layer.scaling)
            else:
                triangle = mask is None and view.causal and segment.queries > 1
                some = _by_head(rows, key, value, mask, triangle, layer.scaling, groups)
            attended.append(some)
        output = torch.cat(attended, dim=2)[0]  # [kv_heads, n * groups, D_v]
        heads: Tensor = output.unflatten(1, (-1, groups))
        return pad(heads.transpose(0, 1).flatten(1), (0, 0, 0, padded_rows))

    forward_decode = forward_extend

    def _masks_of(self, view: View, groups: int, dtype: torch.dtype) -> list[Tensor | None]:
        """A mask for each request, made once per forward."""
        kind = (view, groups, dtype)
        if kind not in self._masks:
            self._masks[kind] = [segment.mask(*kind) for segment in self._segments]
        return self._masks[kind]


def _as_computed(stored: Tensor, scale: Tensor | float | None, dtype: torch.dtype) -> Tensor:
    """K or V of a pool with another dtype. `set_kv_buffer` has divided them by their scale."""
    values = stored.to(dtype)
    return values if scale is None else values.mul_(scale)


def _by_head(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    triangle: bool,
    scale: float,
    groups: int,
) -> Tensor:
    """query: [1, kv_heads, q * groups, D]; key, value: [1, kv_heads, kv, D] -> as query."""
    attended = attend(
        query.unflatten(2, (-1, groups)).transpose(2, 3).flatten(1, 2),
        key,
        value,
        attn_mask=mask,
        is_causal=triangle,
        scale=scale,
        enable_gqa=groups > 1,
    )
    heads: Tensor = attended.unflatten(1, (-1, groups))
    return heads.transpose(2, 3).flatten(2, 3)
