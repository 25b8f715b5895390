"""Gated delta networks (GDN) in torch: the linear attention of hybrid targets.

SGLang's own is made of Triton kernels, or of operations that need AMX and cannot verify a block.
A head keeps a matrix S of values by keys. Each token decays it, writes its value at its key, and
reads it with its query (Yang et al. 2024, arXiv 2412.06464): S = d S, S = S + b (v - S k) k^T,
o = S q.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.attention.fla.fused_norm_gate import FusedRMSNormGated
from sglang.srt.layers.attention.fla.layernorm_gated import RMSNorm as GatedRMSNorm
from sglang.srt.layers.attention.hybrid_linear_attn_backend import (
    HybridLinearAttnBackend,
    MambaAttnBackendBase,
)
from sglang.srt.layers.attention.mamba.mamba2_metadata import ForwardMetadata
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from torch import Tensor
from torch.nn import functional as F

from sglang_dflash.cpu.attention import TorchAttention, queries_of
from sglang_dflash.targets.replay_states import causal_conv, decay_and_strength, l2_normalize

CHUNK = 64  # tokens; the work of a chunk grows with their square


def hybrid_attention(runner: ModelRunner, full: TorchAttention) -> HybridLinearAttnBackend:
    """The backend of a hybrid target. Its gated norms run in torch from now on."""
    for module in runner.model.modules():
        if isinstance(module, (GatedRMSNorm, FusedRMSNormGated)):
            module.forward = partial(_gated_norm, module)
    layers = runner.mambaish_config.full_attention_layer_ids
    return HybridLinearAttnBackend(full, TorchGatedDeltaNet(runner), layers)


class TorchGatedDeltaNet(MambaAttnBackendBase):
    """Linear attention over requests with any number of tokens each."""

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        self._execute_deferred_mamba_cow_and_clear(forward_batch)
        queries, device = queries_of(forward_batch), self.device
        lens = torch.tensor(queries, device=device)
        self._lens = lens
        self._present = torch.arange(max(queries), device=device) < lens[:, None]  # [B, T]
        slots = self.req_to_token_pool.get_mamba_indices(forward_batch.req_pool_indices)
        self._slots = slots.long()
        ends = F.pad(lens.cumsum(0), (1, 0)).int()
        self.forward_metadata = ForwardMetadata(query_start_loc=ends, mamba_cache_indices=slots)

    def forward_extend(
        self,
        layer: RadixLinearAttention,
        forward_batch: ForwardBatch,
        mixed_qkv: Tensor,
        a: Tensor,
        b: Tensor,
        **_: object,
    ) -> Tensor:
        """mixed_qkv: [n, H*K + H*K + HV*V]; a, b: [n, HV]. Returns [1, n, HV, V].

        A verify remembers what it reads, and leaves the states as they were. Other forwards store
        the last state in the request's slot.
        """
        rows, slots = self.req_to_token_pool, self._slots
        cache = rows.mamba2_layer_cache(layer.layer_id)
        windows, tokens = cache.conv[0][slots], self._pad(mixed_qkv)
        inputs = torch.cat([windows.transpose(1, 2), tokens], dim=1)
        assert layer.bias is None
        assert layer.activation in ("silu", "swish")
        qkv = causal_conv(inputs, layer.conv_weights)
        query, key, value = qkv.split([layer.q_dim, layer.k_dim, layer.v_dim], dim=2)
        group = layer.num_v_heads // layer.num_k_heads
        query = l2_normalize(query.unflatten(2, (-1, layer.head_q_dim))) * layer.head_q_dim**-0.5
        key = l2_normalize(key.unflatten(2, (-1, layer.head_k_dim)))
        log_decay, strength = decay_and_strength(a, b, layer.A_log, layer.dt_bias)
        # Padding has the decay 1 and the strength 0, which leave a state as it is.
        read, last = _recurrence(
            query.repeat_interleave(group, dim=2),
            key.repeat_interleave(group, dim=2),
            value.unflatten(2, (-1, layer.head_v_dim)).float(),
            self._pad(log_decay),
            self._pad(strength),
            cache.temporal[slots].float(),
        )
        if forward_batch.forward_mode.is_target_verify():
            rows.mamba_pool.dflash_inputs.store(
                rows.mamba_map[layer.layer_id], windows, tokens, self._pad(a), self._pad(b)
            )
        else:
            ends = self._lens[:, None] + torch.arange(windows.shape[2], device=self.device)
            requests = torch.arange(len(ends), device=self.device)[:, None]
            cache.conv[0][slots] = inputs[requests, ends].transpose(1, 2)
            cache.temporal[slots] = last.to(cache.temporal.dtype)
        return read[self._present].to(mixed_qkv.dtype)[None]

    forward_decode = forward_extend

    def _pad(self, tokens: Tensor) -> Tensor:
        """[n, ..] -> [B, T, ..], 0 after the tokens of a request."""
        padded = tokens.new_zeros(*self._present.shape, *tokens.shape[1:])
        padded[self._present] = tokens
        return padded


def _recurrence(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """query, key: [B, T, HV, K]; value: [B, T, HV, V]; log_decay, strength: [B, T, HV].

    states: [B, HV, V, K]. Returns what each token reads, as value, and the last states.
    """
    read = []
    parts = (x.split(CHUNK, dim=1) for x in (query, key, value, log_decay, strength))
    for queries, *tokens in zip(*parts, strict=True):
        chunk = Chunk.of(states, *tokens)
        read.append(chunk.read(queries))
        states = chunk.last()
    return torch.cat(read, dim=1), states


@dataclass(frozen=True)
class Chunk:
    """T tokens in front of which the states are known, in matrix products instead of a loop.

    A state after token t is S_t = D_t S_0 + sum of D_t / D_j c_j k_j^T for j <= t, with D_t the
    product of the decays. The changes c_t = b_t (v_t - what S_t-1 holds at k_t) follow from a
    triangular system (the chunkwise form of Yang et al. 2024).
    """

    states: Tensor  # [.., HV, V, K] float32
    key: Tensor  # [.., HV, T, K]
    changes: Tensor  # [.., HV, T, V]
    log_decay: Tensor  # [.., HV, T] float64, log D_t, whose differences count

    @classmethod
    def of(
        cls, states: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor
    ) -> Chunk:
        """states: [.., HV, V, K]; key: [.., T, HV, K]; value: [.., T, HV, V].

        log_decay, strength: [.., T, HV]. All are float32.
        """
        key, value = key.transpose(-3, -2), value.transpose(-3, -2)
        strength = strength.transpose(-2, -1)[..., None]
        summed = log_decay.transpose(-2, -1).double().cumsum(-1)
        known = (key @ states.transpose(-2, -1)) * summed.exp().float()[..., None]
        system = (key @ key.transpose(-2, -1) * strength * _decays(summed)).tril(-1)
        changes = torch.linalg.solve_triangular(
            system, (value - known) * strength, upper=False, unitriangular=True
        )
        return cls(states, key, changes, summed)

    def read(self, query: Tensor) -> Tensor:
        """The value that each token reads. query: [.., T, HV, K]. Returns [.., T, HV, V]."""
        query = query.transpose(-3, -2)
        before = (query @ self.states.transpose(-2, -1)) * self.log_decay.exp().float()[..., None]
        weights = (query @ self.key.transpose(-2, -1) * _decays(self.log_decay)).tril()
        return (before + weights @ self.changes).transpose(-3, -2)

    def last(self) -> Tensor:
        """The states after all tokens, [.., HV, V, K]."""
        whole = self.log_decay[..., -1:]
        left = (whole - self.log_decay).exp().float()[..., None]
        before = self.states * whole.exp().float()[..., None]
        return before + self.changes.transpose(-2, -1) @ (self.key * left)


def _decays(log_decay: Tensor) -> Tensor:
    """D_t / D_j at [.., t, j] for j <= t, and 1 elsewhere. log_decay: [.., T]."""
    between = log_decay[..., :, None] - log_decay[..., None, :]
    return between.clamp(max=0).exp().float()


def _gated_norm(module: Any, x: Tensor, z: Tensor) -> Tensor:
    """`forward` of both gated norms, of layers that norm before the gate. x, z: [n, D]."""
    assert getattr(module, "norm_before_gate", True)
    assert getattr(module, "group_size", None) is None
    assert module.activation in ("silu", "swish", "sigmoid")
    gate = torch.sigmoid(z.float()) if module.activation == "sigmoid" else F.silu(z.float())
    normed = x.float() * (x.float().square().mean(-1, keepdim=True) + module.eps).rsqrt()
    gated: Tensor = normed * module.weight.float() * gate
    return gated.to(x.dtype)
