"""LiLiCorr's transformer over the candidates of all positions, in plain PyTorch.

The rules are those of SGLang 0.5.23's `models/lilicorr.py`. A candidate is its embedding, the
position's hidden state, and what the LM head says of it. A pair's score is the product of two
vectors, of how the first candidate goes out and the second one comes in. The anchor goes out by the
context of the token before it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sglang_dflash.checkpoint.formats.lilicorr import FEATURES, LiLiCorr


class MLP(nn.Module):
    def __init__(self, inputs: int, inner: int, outputs: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(inputs, inner)
        self.down_proj = nn.Linear(inner, outputs)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.up_proj(hidden)))
        return output


class Attention(nn.Module):
    """Attention of all candidates to each other, with the names of nn.MultiheadAttention."""

    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.empty(3 * size, size))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * size))
        self.out_proj = nn.Linear(size, size)
        self._num_heads = num_heads

    def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:
        """[B, n, E]. bias: [heads, n, n]."""
        projected = F.linear(hidden, self.in_proj_weight, self.in_proj_bias)
        q, k, v = projected.unflatten(2, (3, self._num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        output: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return output


class Layer(nn.Module):
    def __init__(self, family: LiLiCorr, eps: float) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(family.size, eps=eps)
        self.attn = Attention(family.size, family.num_heads)
        self.mlp_norm = nn.RMSNorm(family.size, eps=eps)
        self.mlp = MLP(family.size, family.mlp_size, family.size)

    def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:
        hidden = hidden + self.attn(self.attn_norm(hidden), bias)
        output: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return output


class CandidateTransformer(nn.Module):
    """The parts of a checkpoint under `lilicorr`."""

    def __init__(self, family: LiLiCorr, hidden: int, width: int, eps: float) -> None:
        """hidden: H, of the draft; width: N, positions of a block in training; eps: of norms."""
        super().__init__()
        size = family.size
        self.token_proj = nn.Identity() if size == hidden else nn.Linear(hidden, size)
        self.pass_hidden_proj = nn.Linear(hidden, size)
        self.context_proj = nn.Linear(hidden, size)
        self.feature_norm = nn.LayerNorm(FEATURES)
        self.feature_mlp = MLP(FEATURES, size, size)
        self.slot_embedding = nn.Parameter(torch.empty(1, 1, width - 1, 1, size))
        self.rank_embedding = nn.Parameter(torch.empty(1, 1, 1, family.top_k, size))
        self.relative_slot_bias = nn.Parameter(torch.empty(family.num_heads, 2 * width - 1))
        self.same_slot_bias = nn.Parameter(torch.empty(family.num_heads))
        layers = range(family.num_layers)
        self.layers = nn.ModuleList(Layer(family, eps) for _ in layers)
        self.output_norm = nn.RMSNorm(size, eps=eps)
        self.anchor_norm = nn.RMSNorm(size, eps=eps)
        self.factor_input_proj = nn.Linear(3 * size, size)
        self.out_head = nn.Linear(size, family.factors)
        self.in_head = nn.Linear(size, family.factors)
        self.anchor_out_head = nn.Linear(size, family.factors)
        self._family = family

    def forward(
        self, embedded: Tensor, log_probs: Tensor, hidden: Tensor, context: Tensor
    ) -> Tensor:
        """The scores of candidates behind those of the position before: [B, S, k, k] float32.

        embedded: [B, S, k, H], the candidates by falling probability; log_probs: [B, S, k] float32;
        hidden: [B, S, H]; context: [B, H], of the token before the anchor. All those before the
        first position are the anchor.
        """
        states = self.token_proj(embedded) + self.pass_hidden_proj(hidden)[:, :, None]
        features = self._features(log_probs).to(states.dtype)
        states = states + self.feature_mlp(self.feature_norm(features))
        states = states + self.slot_embedding[0, :, : states.shape[1]] + self.rank_embedding[0]
        flat, bias = states.flatten(1, 2), self._bias(states.shape[1])
        for layer in self.layers:
            flat = layer(flat, bias)
        states = self.output_norm(flat).view_as(states)
        anchor = self.anchor_norm(self.context_proj(context))
        beside = anchor[:, None, None].expand_as(states)
        factors = torch.cat([states, beside, states * beside], dim=3)
        factors = F.silu(self.factor_input_proj(factors))
        coming = self._unit(self.in_head(factors))  # [B, S, k, F]
        going = self._unit(self.out_head(factors[:, :-1]))
        first = self._unit(self.anchor_out_head(anchor))[:, None, None]
        going = torch.cat([first.expand_as(coming[:, :1]), going], dim=1)
        return self._family.logit_scale * torch.matmul(going, coming.mT).float()

    @staticmethod
    def _features(log_probs: Tensor) -> Tensor:
        """What the LM head says of candidates: [B, S, k, 5] float32."""
        count = log_probs.shape[2]
        rank = torch.arange(count, device=log_probs.device) / max(1, count - 1)
        gap = log_probs - log_probs[:, :, :1]
        each = log_probs, log_probs.exp(), gap, rank.expand_as(gap), (rank == 0).expand_as(gap)
        return torch.stack([column.float() for column in each], dim=3)

    def _bias(self, slots: int) -> Tensor:
        """What attention gets by the distance of two candidates' positions: [heads, n, n]."""
        slot = torch.arange(slots, device=self.same_slot_bias.device)
        slot = slot.repeat_interleave(self._family.top_k)
        apart = slot[:, None] - slot
        bias = self.relative_slot_bias[:, apart + self.relative_slot_bias.shape[1] // 2]
        return torch.where(apart == 0, bias + self.same_slot_bias[:, None, None], bias)

    def _unit(self, vectors: Tensor) -> Tensor:
        return F.normalize(vectors, dim=-1, eps=self._family.vector_eps)
