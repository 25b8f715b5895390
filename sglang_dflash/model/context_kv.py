"""Context KV: the target's hidden states, projected into the draft's KV pool."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from torch import Tensor
from torch.nn import functional as F

from sglang_dflash.kernels.context_kv import store_context_kv
from sglang_dflash.model.draft import DFlashDraftModel

ROW_CHUNK = 4096  # tokens of a prefill projected at once


class ContextKV:
    """Writes K/V of context tokens into every draft layer (DFlash paper, "KV injection")."""

    def __init__(self, model: DFlashDraftModel, pool: MHATokenToKVPool) -> None:
        self.model, self.pool = model, pool
        attention: list[Any] = [layer.self_attn for layer in model.layers]
        first = attention[0]
        self._rows = slice(first.q_size, first.q_size + 2 * first.kv_size)  # K, V of the fused QKV
        self._attention = attention
        self._shape = (len(attention), 2, first.num_kv_heads, first.head_dim)
        self._eps = first.k_norm.variance_epsilon
        self._k_pools = [pool.get_key_buffer(a.attn.layer_id) for a in attention]
        self._v_pools = [pool.get_value_buffer(a.attn.layer_id) for a in attention]
        self.refresh()

    def refresh(self) -> None:
        """Stack the K/V projections of all layers; again after a weight update."""
        projections = [a.qkv_proj for a in self._attention]
        self._weight = torch.cat([p.weight[self._rows] for p in projections])  # [L * 2kv, H]
        biases = [p.bias for p in projections]
        self._bias = None if biases[0] is None else torch.cat([b[self._rows] for b in biases])
        self._norm = torch.stack([a.k_norm.weight for a in self._attention])  # [L, D]

    def write(self, hidden_states: Tensor, positions: Tensor, slots: Tensor) -> None:
        """hidden_states: [n, >= K*H_target], features first; positions, slots: [n] int64."""
        features = hidden_states[:, : self.model.fc.in_features]
        for rows in range(0, features.shape[0], ROW_CHUNK):
            chunk = slice(rows, rows + ROW_CHUNK)
            self._write(features[chunk], positions[chunk], slots[chunk])

    def _write(self, features: Tensor, positions: Tensor, slots: Tensor) -> None:
        context = self.model.hidden_norm(self.model.fc(features))  # [n, H]
        kv = F.linear(context, self._weight, self._bias).unflatten(1, self._shape)
        store_context_kv(
            kv,
            self._norm,
            self._eps,
            self._attention[0].rotary_emb.cos_sin_cache,
            positions,
            slots,
            self._k_pools,
            self._v_pools,
        )
