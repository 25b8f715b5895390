"""The draft in plain PyTorch, for training only. The server runs `sglang_dflash.model.draft`.

One forward predicts many blocks of a sequence at once (DFlash paper, section "training"). The
context K/V of the whole sequence is computed once. A mask lets each block see the context before
its anchor and, without causality, itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def _rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate halves. x: [B, heads, T, D]; positions: [B, T] int64."""
    half = x.shape[-1] // 2
    inverse = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions[:, None, :, None].float() * inverse
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Convolution(nn.Module):
    """DFlash 2's convolutions before and behind a sublayer. They begin as the identity."""

    def __init__(self, hidden: int, taps: int, group: int) -> None:
        super().__init__()
        self.taps, self.group, self.groups = taps, group, hidden // group
        base = torch.zeros(2, taps, hidden)
        base[:, 0] = 1
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(hidden, 2 * taps * self.groups, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def kernels(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of both sides, [.., N, taps, H] each. x: [.., N, H], the sublayer's normed input."""
        of_x = self.kernel_projection(x).unflatten(-1, (2, self.taps, self.groups))
        first, second = (self.base_kernel + of_x.repeat_interleave(self.group, -1)).unbind(-3)
        return first, second

    def mix(self, x: Tensor, kernel: Tensor) -> Tensor:
        """Add up x and the positions before it: [.., N, H]."""
        shifted = [F.pad(x, (0, 0, tap, 0))[..., : x.shape[-2], :] for tap in range(self.taps)]
        return sum((kernel[..., t, :] * x for t, x in enumerate(shifted)), torch.zeros(()))


class Layer(nn.Module):
    attention_conv: Convolution | None = None
    mlp_conv: Convolution | None = None
    causal = False  # in the block

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        hidden, dim, eps = c["hidden_size"], c["head_dim"], c["rms_norm_eps"]
        self.heads, self.kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.dim, self.theta = dim, c["rope_theta"]
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(hidden, self.heads * dim, bias=False),
                "k_proj": nn.Linear(hidden, self.kv_heads * dim, bias=False),
                "v_proj": nn.Linear(hidden, self.kv_heads * dim, bias=False),
                "o_proj": nn.Linear(self.heads * dim, hidden, bias=False),
                "q_norm": nn.RMSNorm(dim, eps),
                "k_norm": nn.RMSNorm(dim, eps),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(hidden, c["intermediate_size"], bias=False),
                "up_proj": nn.Linear(hidden, c["intermediate_size"], bias=False),
                "down_proj": nn.Linear(c["intermediate_size"], hidden, bias=False),
            }
        )

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        positions: Tensor,
        context_positions: Tensor,
        hidden_context: Tensor,
    ) -> Tensor:
        """x: [B, A, N, H] of the blocks; context: [B, S, H]; hidden_context: [B, A, S] bool."""
        a, normed, kernel = self.self_attn, self.input_layernorm(x), None
        if self.attention_conv is not None:
            first, kernel = self.attention_conv.kernels(normed)
            normed = self.attention_conv.mix(normed, first)
        h = normed.flatten(1, 2)
        q = a["q_norm"](a["q_proj"](h).unflatten(-1, (self.heads, self.dim))).transpose(1, 2)
        source = torch.cat([context, h], dim=1)
        k = a["k_norm"](a["k_proj"](source).unflatten(-1, (self.kv_heads, self.dim)))
        v = a["v_proj"](source).unflatten(-1, (self.kv_heads, self.dim)).transpose(1, 2)
        q = _rope(q, positions, self.theta)
        k = _rope(k.transpose(1, 2), torch.cat([context_positions, positions], 1), self.theta)
        o = a["o_proj"](self._attend(q, k, v, hidden_context).transpose(1, 2).flatten(2))
        o = o.unflatten(1, x.shape[1:3])
        if self.attention_conv is not None and kernel is not None:
            o = self.attention_conv.mix(o, kernel)
        x = x + o
        h, m = self.post_attention_layernorm(x), self.mlp
        if self.mlp_conv is not None:
            first, kernel = self.mlp_conv.kernels(h)
            h = self.mlp_conv.mix(h, first)
        mixed: Tensor = m["down_proj"](F.silu(m["gate_proj"](h)) * m["up_proj"](h))
        if self.mlp_conv is not None and kernel is not None:
            mixed = self.mlp_conv.mix(mixed, kernel)
        return x + mixed

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, hidden_context: Tensor) -> Tensor:
        """Each block sees its part of the context and itself, and no keys of other blocks.

        q: [B, heads, A * N, D]; k, v: [B, kv heads, S + A * N, D].
        """
        blocks, length = hidden_context.shape[1:]
        (k, k_block), (v, v_block) = (t.tensor_split([length], dim=2) for t in (k, v))
        k_block, v_block = (t.unflatten(2, (blocks, -1))[:, :, None] for t in (k_block, v_block))
        q = q.unflatten(1, (self.kv_heads, -1)) * self.dim**-0.5  # [B, kv heads, each, A * N, D]
        q_block = q.unflatten(3, (blocks, -1))
        scores = (q.flatten(2, 3) @ k.mT).view(*q_block.shape[:-1], length)
        scores = scores.masked_fill(hidden_context[:, None, None, :, None], -torch.inf)
        of_block = q_block @ k_block.mT
        if self.causal:
            later = torch.ones(of_block.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            of_block = of_block.masked_fill(later, -torch.inf)
        seen = torch.cat([scores, of_block], dim=-1).softmax(-1).to(v.dtype)
        context, block = seen.tensor_split([length], dim=-1)
        o = context.flatten(2, 4) @ v
        attended: Tensor = o.view_as(q_block) + block @ v_block
        return attended.flatten(1, 2).flatten(2, 3)


class Draft(nn.Module):
    """c: the z-lab config.json as a dict. Parameter names are those of the z-lab checkpoint."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        hidden = c["hidden_size"]
        self.mask_token_id = c["dflash_config"]["mask_token_id"]
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.fc = nn.Linear(
            len(c["dflash_config"]["target_layer_ids"]) * hidden, hidden, bias=False
        )
        self.hidden_norm = nn.RMSNorm(hidden, c["rms_norm_eps"])
        self.norm = nn.RMSNorm(hidden, c["rms_norm_eps"])
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def convolve(self, taps: int, group: int) -> None:
        """Add the convolutions of DFlash 2 to all layers."""
        for layer in self.layers:
            hidden = self.norm.weight.shape[0]
            layer.attention_conv = Convolution(hidden, taps, group)
            layer.mlp_conv = Convolution(hidden, taps, group)

    def forward(
        self,
        features: Tensor,
        ids: Tensor,
        anchors: Tensor,
        embed: nn.Embedding,
        size: int,
        after_layer: Callable[[int, Tensor, Tensor], Tensor] = lambda _, x, __: x,
    ) -> Tensor:
        """Hidden states of every block.

        features: [B, S, K*H]; ids: [B, S] int64; anchors: [B, A] int64 positions; size:
        of a block, N; after_layer: takes a layer's number and output, and the block's tokens.
        -> [B, A, N, H]
        """
        batch, length = ids.shape
        count = anchors.shape[1]
        block = torch.full((batch, count, size), self.mask_token_id, device=ids.device)
        block[:, :, 0] = ids.gather(1, anchors)
        offsets = torch.arange(size, device=ids.device)
        positions = (anchors[:, :, None] + offsets).flatten(1)
        context_positions = torch.arange(length, device=ids.device).expand(batch, -1)
        hidden_context = context_positions[:, None] >= anchors[:, :, None]
        context = self.hidden_norm(self.fc(features))
        x = embed(block)
        for i, layer in enumerate(self.layers):
            x = layer(x, context, positions, context_positions, hidden_context)
            x = after_layer(i, x, block)
        normed: Tensor = self.norm(x)
        return normed
