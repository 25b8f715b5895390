"""The draft's layers: Qwen3's, with attention over the block and its context."""

from __future__ import annotations

from typing import Any, TypeAlias

from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.qwen2 import Qwen2MLP
from sglang.srt.models.utils import apply_qk_norm
from torch import Tensor, nn

from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.model.rope import DraftRotary

Quantization: TypeAlias = QuantizationConfig | None


class DFlashAttention(nn.Module):
    def __init__(
        self, config: DFlashConfig, layer_id: int, rotary_emb: DraftRotary, quant: Quantization
    ) -> None:
        super().__init__()
        tp_size = get_tp_group().world_size
        size = config.hidden_size
        dim = config.head_dim
        heads = config.num_heads
        kv_heads = config.num_kv_heads
        self.head_dim = dim
        self.num_kv_heads = max(1, kv_heads // tp_size)

        def linear(name: str) -> dict[str, Any]:
            prefix = f"layers.{layer_id}.self_attn.{name}"
            return {"bias": config.attention_bias, "quant_config": quant, "prefix": prefix}

        self.qkv_proj = QKVParallelLinear(size, dim, heads, kv_heads, **linear("qkv_proj"))
        self.o_proj = RowParallelLinear(heads * dim, size, **linear("o_proj"))
        self.q_norm = RMSNorm(dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(dim, eps=config.rms_norm_eps)
        self.rotary_emb = rotary_emb
        view = config.attention[layer_id]
        num_heads = heads // tp_size
        self.attn = RadixAttention(
            num_heads,
            dim,
            scaling=dim**-0.5,
            num_kv_heads=self.num_kv_heads,
            layer_id=layer_id,
            sliding_window_size=-1 if view.left is None else view.left,
            attn_type=AttentionType.DECODER if view.causal else AttentionType.ENCODER_ONLY,
        )
        # SGLang's layer has no field for it: the tokens before the anchor that all positions see.
        self.attn.dflash_anchor_window = view.window if view.anchored else None
        self.q_size = num_heads * dim
        self.kv_size = self.num_kv_heads * dim

    def forward(self, positions: Tensor, hidden: Tensor, forward_batch: ForwardBatch) -> Tensor:
        """Attend over context and block. positions: [n] int64; hidden: [n, H] -> [n, H]."""
        qkv, _ = self.qkv_proj(hidden)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = apply_qk_norm(q, k, self.q_norm, self.k_norm, self.head_dim)
        q, k = self.rotary_emb(positions, q, k)
        output: Tensor
        output, _ = self.o_proj(self.attn(q, k, v, forward_batch))
        return output


class DFlashLayer(nn.Module):
    block_width: int  # positions that the draft reads at once, set before the first forward

    def __init__(
        self, config: DFlashConfig, layer_id: int, rotary_emb: DraftRotary, quant: Quantization
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DFlashAttention(config, layer_id, rotary_emb, quant)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Qwen2MLP(
            config.hidden_size, config.intermediate_size, "silu", quant, f"layers.{layer_id}.mlp"
        )

    def forward(
        self, positions: Tensor, hidden: Tensor, batch: ForwardBatch, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The layer's output and its residual, [n, H] each; both are added by the next norm."""
        if residual is None:
            hidden, residual = self.input_layernorm(hidden), hidden
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self._attend(positions, hidden, batch)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self._transform(hidden), residual

    def _attend(self, positions: Tensor, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        output: Tensor = self.self_attn(positions, hidden, batch)
        return output

    def _transform(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.mlp(hidden)
        return output
