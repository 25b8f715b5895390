"""A DFlash draft in plain PyTorch, written from the paper and the z-lab format alone.

No KV cache: every call recomputes the whole context from the target's hidden states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x: [n, heads, D]."""
    dim = x.shape[-1]
    inverse = 1.0 / theta ** (torch.arange(0, dim, 2).float() / dim)
    angle = positions.float()[:, None] * inverse  # [n, D/2]
    cos = torch.cat([angle.cos(), angle.cos()], -1)[:, None]
    sin = torch.cat([angle.sin(), angle.sin()], -1)[:, None]
    half = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1)
    return x * cos + half * sin


@torch.no_grad()
def features(target: PreTrainedModel, ids: list[int], layer_ids: list[int]) -> Tensor:
    """Hidden states after these layers, concatenated: [n, K * H]."""
    states = target(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[k + 1][0] for k in layer_ids], dim=-1)


@torch.no_grad()
def draft_block(
    target: PreTrainedModel,
    config: dict[str, Any],
    weights: dict[str, Tensor],
    ids: list[int],
    block_size: int | None = None,
    first: int = 0,
) -> list[int]:
    """Drafts behind `ids`, whose last token is the anchor: block_size - 1 token ids.

    Context tokens before position `first` are not seen.
    """
    n = block_size or config["block_size"]
    eps, theta, dim = config["rms_norm_eps"], config["rope_theta"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    context, anchor = ids[:-1], ids[-1]
    embedding = target.get_input_embeddings().weight.float()
    f = features(target, context, config["dflash_config"]["target_layer_ids"])
    c = _norm(f @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)[first:]
    mask = config["dflash_config"]["mask_token_id"]
    x = embedding[torch.tensor([anchor] + [mask] * (n - 1))]
    context_at = torch.arange(first, len(context))
    block_at = torch.arange(n) + len(context)
    for i in range(config["num_hidden_layers"]):
        w = {
            k.removeprefix(f"layers.{i}."): v
            for k, v in weights.items()
            if k.startswith(f"layers.{i}.")
        }

        def project(source: Tensor, name: str, count: int, w: dict[str, Tensor] = w) -> Tensor:
            out = source @ w[f"self_attn.{name}_proj.weight"].T
            if f"self_attn.{name}_proj.bias" in w:
                out = out + w[f"self_attn.{name}_proj.bias"]
            return out.view(-1, count, dim)

        h = _norm(x, w["input_layernorm.weight"], eps)
        q = _rope(_norm(project(h, "q", heads), w["self_attn.q_norm.weight"], eps), block_at, theta)
        source, at = torch.cat([c, h]), torch.cat([context_at, block_at])
        k = _rope(
            _norm(project(source, "k", kv_heads), w["self_attn.k_norm.weight"], eps), at, theta
        )
        v = project(source, "v", kv_heads)
        out = torch.empty(n, heads, dim)
        for head in range(heads):
            kv = head // (heads // kv_heads)
            score = (q[:, head] @ k[:, kv].T) * dim**-0.5
            out[:, head] = score.softmax(-1) @ v[:, kv]
        o = out.flatten(1) @ w["self_attn.o_proj.weight"].T
        x = x + o + w.get("self_attn.o_proj.bias", 0)
        h = _norm(x, w["post_attention_layernorm.weight"], eps)
        gate = torch.nn.functional.silu(h @ w["mlp.gate_proj.weight"].T)
        x = x + (gate * (h @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    x = _norm(x, weights["norm.weight"], eps)[1:]
    return (x @ target.get_output_embeddings().weight.float().T).argmax(-1).tolist()
