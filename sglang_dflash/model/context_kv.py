"""Context KV: hidden states of the target, projected into the draft's KV pool."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from torch import Tensor
from torch.nn import functional as F

from sglang_dflash.kernels import Kernels
from sglang_dflash.kernels.store_kv import Pools
from sglang_dflash.model.draft import DFlashDraftModel

TOKEN_CHUNK = 4096  # tokens of a prefill projected at once


class ContextKV:
    """Writes K/V of context tokens into every draft layer (DFlash paper, "KV injection").

    Unquantised projections of all layers are stacked once and run as one. Quantised ones are not
    sliced: each layer's whole QKV projection runs, and its queries are dropped.
    """

    def __init__(
        self,
        model: DFlashDraftModel,
        pool: MHATokenToKVPool,
        kernels: Kernels,
        queues_work: bool,
    ) -> None:
        """queues_work: the host would have to wait for the device to know which tokens to skip."""
        self._model = model
        self._kernels = kernels
        self._queues_work = queues_work
        self.keeps_last = model.head.reads_last_context
        self._attention: list[Any] = [layer.self_attn for layer in model.layers]
        attention = self._attention
        first = attention[0]
        self._shape = (len(attention), 2, first.num_kv_heads, first.head_dim)
        self._eps = first.k_norm.variance_epsilon
        self._pools = Pools.of(
            [pool.get_key_buffer(a.attn.layer_id) for a in attention],
            [pool.get_value_buffer(a.attn.layer_id) for a in attention],
        )
        self._one_rope = all(a.rotary_emb is first.rotary_emb for a in attention)
        self._stacks: list[tuple[Tensor, list[Tensor]]] = []  # copies, and what they are of
        self._norm = self._stacked([a.k_norm.weight for a in attention]).view(-1, first.head_dim)
        projections = [a.qkv_proj for a in attention]
        stackable = all(isinstance(p.quant_method, UnquantizedLinearMethod) for p in projections)
        self._project = self._stack(projections) if stackable else self._project_each

    def read_weights(self) -> None:
        """Follow weights of the model that have changed in place."""
        for stack, parts in self._stacks:
            torch.cat(parts, out=stack)

    def _stacked(self, parts: list[Tensor]) -> Tensor:
        parts = [part.detach() for part in parts]
        self._stacks.append((torch.cat(parts), parts))
        return self._stacks[-1][0]

    def _stack(self, projections: list[Any]) -> Any:
        """One projection for all layers: [n, H] -> [n, L * 2 * kv]."""
        outputs = slice(self._attention[0].q_size, None)  # K, V of the fused QKV
        weight = self._stacked([p.weight[outputs] for p in projections])
        biases = [p.bias for p in projections]
        bias = None if biases[0] is None else self._stacked([b[outputs] for b in biases])
        return lambda context: F.linear(context, weight, bias)

    def _project_each(self, context: Tensor) -> Tensor:
        parts = [a.qkv_proj(context)[0][:, a.q_size :] for a in self._attention]
        return torch.cat(parts, dim=1)

    def write(self, hidden_states: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Write tokens of the context.

        hidden_states: [n, >= K*H_target], features first; positions: [n] int64; slots: [n] int64, 0
        (SGLang's dummy slot) for tokens that are not written.
        """
        if not self._queues_work and not slots.all():
            written = slots != 0
            hidden_states = hidden_states[written]
            positions = positions[written]
            slots = slots[written]
        for start in range(0, len(slots), TOKEN_CHUNK):
            chunk = slice(start, start + TOKEN_CHUNK)
            self._write(hidden_states[chunk], positions[chunk], slots[chunk])

    def keep_last(self, hidden_states: Tensor, last: Tensor, rows: Tensor) -> None:
        """Keep the context of each request's last token for the draft's head.

        hidden_states: as in `write`; last: [B] int64, its index there; rows: [B] integers, the
        requests' of `req_to_token`.
        """
        self._model.head.last_context[rows.long()] = self._context(hidden_states[last])

    def _write(self, states: Tensor, positions: Tensor, slots: Tensor) -> None:
        kv = self._project(self._context(states)).view(-1, *self._shape)
        cos_sin = self._cos_sin(positions)
        self._kernels.store_kv(kv, self._norm, self._eps, cos_sin, slots, self._pools)

    def _context(self, states: Tensor) -> Tensor:
        """[n, >= K*H_target] -> [n, H]."""
        features = states[:, : self._model.fc.in_features]
        context: Tensor = self._model.hidden_norm(self._model.fc(features))
        return context

    def _cos_sin(self, positions: Tensor) -> Tensor:
        """RoPE tables at these positions: [n, L, D], or [n, 1, D] if all layers share one."""
        if self._one_rope:
            table: Tensor = self._attention[0].rotary_emb.cos_sin_cache
            return table[positions][:, None]
        return torch.stack([a.rotary_emb.cos_sin_cache[positions] for a in self._attention], dim=1)
