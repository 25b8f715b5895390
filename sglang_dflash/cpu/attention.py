"""The `torch_native` attention backend with real query rows only.

SGLang's own pads the queries of a request to its whole length, and looks up a request's slots again
in every layer. Here a forward is planned once and a request's queries are what it has. The same
class serves prefill, decode, the draft's block (no mask) and the target's (causal, lower right).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass
class Segment:
    """One request in a forward: q queries at the end of kv keys."""

    rows: slice  # of the flat queries
    slots: Tensor  # [kv] int64
    masks: dict[int, Tensor] = field(default_factory=dict)  # by window, [q, kv] bool

    def mask(self, window: int) -> Tensor | None:
        """Keys each query may see; None where all. window -1: no window (causal only)."""
        q, kv = self.rows.stop - self.rows.start, len(self.slots)
        if q == 1 and window < 0:
            return None
        if window not in self.masks:
            at = torch.arange(kv - q, kv)[:, None]
            key = torch.arange(kv)
            seen = key <= at
            self.masks[window] = seen & (key >= at - window) if window >= 0 else seen
        return self.masks[window]


class RealRowsAttention(TorchNativeAttnBackend):
    """Registered as `torch_native`: SGLang picks its torch helper functions by that name."""

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        prefix = forward_batch.seq_lens.tolist()
        if forward_batch.forward_mode.is_target_verify():
            queries = [forward_batch.spec_info.draft_token_num] * len(prefix)
            lengths = [p + q for p, q in zip(prefix, queries, strict=True)]
        elif forward_batch.forward_mode.is_decode():
            queries, lengths = [1] * len(prefix), prefix
        else:
            queries, lengths = list(forward_batch.extend_seq_lens_cpu), prefix
        table = self.req_to_token_pool.req_to_token
        start, self._segments = 0, []
        for row, q, kv in zip(
            forward_batch.req_pool_indices.tolist(), queries, lengths, strict=True
        ):
            self._segments.append(Segment(slice(start, start + q), table[row, :kv].long()))
            start += q

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
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        if save_kv_cache and k is not None:
            where = {"swa_loc": self.swa_out_cache_loc} if self.use_sliding_window_kv_pool else {}
            self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v, **where)
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        output = q.new_empty(query.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        window = layer.sliding_window_size if layer.sliding_window_size is not None else -1
        for segment in self._segments:
            output[segment.rows] = self._attend(
                query[segment.rows],
                keys[segment.slots],
                values[segment.slots],
                layer,
                segment,
                window,
            )
        return output.flatten(1)

    forward_decode = forward_extend

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer: RadixAttention,
        segment: Segment,
        window: int,
    ) -> Tensor:
        """query: [q, heads, D]; key, value: [kv, kv_heads, D] -> [q, heads, D_v]."""
        masked = layer.attn_type != AttentionType.ENCODER_ONLY
        square = masked and window < 0 and query.shape[0] == key.shape[0]
        attended = scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.to(query.dtype).transpose(0, 1)[None],
            value.to(query.dtype).transpose(0, 1)[None],
            attn_mask=segment.mask(window) if masked and not square else None,
            is_causal=square,
            scale=layer.scaling,
            enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
        )
        return attended[0].transpose(0, 1)
