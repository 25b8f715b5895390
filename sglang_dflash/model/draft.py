"""The draft: Qwen3-shaped layers that attend without causality over the block and its context."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from sglang.srt.distributed import get_tensor_model_parallel_world_size
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.models.utils import apply_qk_norm
from torch import Tensor, nn
from transformers import PretrainedConfig

from sglang_dflash.checkpoint import load_config, rename_weights
from sglang_dflash.config import DFlashConfig
from sglang_dflash.errors import Refusal
from sglang_dflash.model.lm_head import TargetVocabulary

STACKED = (  # (parameter, checkpoint name, shard)
    ("qkv_proj", "q_proj", "q"),
    ("qkv_proj", "k_proj", "k"),
    ("qkv_proj", "v_proj", "v"),
    ("gate_up_proj", "gate_proj", 0),
    ("gate_up_proj", "up_proj", 1),
)


class DFlashAttention(nn.Module):
    def __init__(self, config: DFlashConfig, layer_id: int) -> None:
        super().__init__()
        tp_size = get_tensor_model_parallel_world_size()
        self.head_dim = config.head_dim
        self.num_kv_heads = max(1, config.num_kv_heads // tp_size)
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_heads,
            config.num_kv_heads,
            bias=config.attention_bias,
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim, config.hidden_size, bias=config.attention_bias
        )
        self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.rotary_emb = get_rope(
            config.head_dim,
            rotary_dim=config.head_dim,
            max_position=config.max_position_embeddings,
            base=config.rope_theta,
            rope_scaling=config.rope_scaling,
        )
        num_heads = config.num_heads // tp_size
        self.attn = RadixAttention(
            num_heads,
            config.head_dim,
            scaling=config.head_dim**-0.5,
            num_kv_heads=self.num_kv_heads,
            layer_id=layer_id,
            attn_type=AttentionType.ENCODER_ONLY,
        )
        self.q_size = num_heads * config.head_dim
        self.kv_size = self.num_kv_heads * config.head_dim

    def forward(self, positions: Tensor, hidden: Tensor, forward_batch: ForwardBatch) -> Tensor:
        qkv, _ = self.qkv_proj(hidden)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = apply_qk_norm(q, k, self.q_norm, self.k_norm, self.head_dim)
        q, k = self.rotary_emb(positions, q, k)
        output, _ = self.o_proj(self.attn(q, k, v, forward_batch))
        return output


class DFlashMLP(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size, [config.intermediate_size] * 2, bias=False
        )
        self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = SiluAndMul()

    def forward(self, x: Tensor) -> Tensor:
        gate_up, _ = self.gate_up_proj(x)
        output, _ = self.down_proj(self.act_fn(gate_up))
        return output


class DFlashLayer(nn.Module):
    def __init__(self, config: DFlashConfig, layer_id: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DFlashAttention(config, layer_id)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = DFlashMLP(config)

    def forward(
        self,
        positions: Tensor,
        hidden: Tensor,
        forward_batch: ForwardBatch,
        residual: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual = hidden
            hidden = self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(positions, hidden, forward_batch)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class DFlashDraftModel(nn.Module):
    """Drafts a block in one forward: target embedding, layers, norm, target LM-head argmax.

    `fc` and `hidden_norm` turn the target's features into the context that
    `model.context_kv` writes into this model's KV pool. `vocabulary` is bound by the worker once
    both models exist; `block_size` is the served block, at most the trained one.
    """

    def __init__(self, config: PretrainedConfig, quant_config=None, prefix: str = "") -> None:
        super().__init__()
        self.config = config
        self.dflash = dflash = load_config(config.dflash_path)
        self.layers = nn.ModuleList(DFlashLayer(dflash, i) for i in range(dflash.num_layers))
        self.norm = RMSNorm(dflash.hidden_size, eps=dflash.rms_norm_eps)
        self.fc = nn.Linear(
            len(dflash.target_layer_ids) * dflash.target_hidden_size, dflash.hidden_size, bias=False
        )
        self.hidden_norm = RMSNorm(dflash.hidden_size, eps=dflash.rms_norm_eps)
        self.vocabulary: TargetVocabulary
        self.block_size = dflash.block_size

    def forward(
        self, input_ids: Tensor, positions: Tensor, forward_batch: ForwardBatch
    ) -> LogitsProcessorOutput:
        """Fill the masks of every block.

        input_ids: [B*N] int64, anchor then masks; positions: [B*N] int64. The drafted block,
        [B*N] int64 with the anchors in place, is returned as `hidden_states`: the one field that
        SGLang's graph runner slices per token and hands back without looking at it.
        """
        hidden = self.vocabulary.embed(input_ids)
        residual = None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, forward_batch, residual)
        hidden, _ = self.norm(hidden, residual)
        masks = hidden.unflatten(0, (-1, self.block_size))[:, 1:]  # [B, N-1, H]
        drafts = self.vocabulary.argmax(masks.flatten(0, 1)).view(-1, self.block_size - 1)
        block = torch.cat([input_ids.view(-1, self.block_size)[:, :1], drafts], dim=1)
        return LogitsProcessorOutput(next_token_logits=None, hidden_states=block.flatten())

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load a checkpoint strictly: a missing or unexpected tensor is a `Refusal`."""
        parameters = dict(self.named_parameters())
        missing = {(name, shard) for name in parameters for shard in _shards(name)}
        unexpected = []
        for checkpoint_name, tensor in weights:
            name, shard = _stacked(rename_weights(self.dflash, checkpoint_name))
            if (name, shard) not in missing:
                unexpected.append(checkpoint_name)
                continue
            missing.remove((name, shard))
            parameter = parameters[name]
            loader = getattr(parameter, "weight_loader", default_weight_loader)
            loader(parameter, tensor) if shard is None else loader(parameter, tensor, shard)
        if missing or unexpected:
            gone = sorted(
                f"{name}[{shard}]" if shard is not None else name for name, shard in missing
            )
            raise Refusal(
                f"The draft {self.dflash.path} does not hold the weights of a {self.dflash.format} "
                f"DFlash draft: missing {gone or 'none'}, unexpected {unexpected or 'none'}."
            )


def _stacked(name: str) -> tuple[str, str | int | None]:
    for parameter, part, shard in STACKED:
        if f".{part}." in name:
            return name.replace(part, parameter), shard
    return name, None


def _shards(name: str) -> list[str | int | None]:
    return [shard for parameter, _, shard in STACKED if f".{parameter}." in name] or [None]


EntryClass = DFlashDraftModel
