"""The draft: Qwen3-shaped layers with non-causal attention over the block and its context."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from sglang.srt.distributed import get_tensor_model_parallel_world_size
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.models.qwen2 import Qwen2MLP
from sglang.srt.models.utils import apply_qk_norm
from torch import Tensor, nn
from transformers import PretrainedConfig

from sglang_dflash.checkpoint import load_config
from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.checkpoint.loading import load
from sglang_dflash.kernels import Kernels
from sglang_dflash.model.heads.convolution import BlockConvolution
from sglang_dflash.model.heads.gru import Correction, PrefixCell, PrefixChain
from sglang_dflash.model.heads.independent import ConfidenceHead, Independent, Predictor
from sglang_dflash.model.heads.markov import KINDS, Chain
from sglang_dflash.model.heads.selector import CandidateSelector, Selection
from sglang_dflash.model.rope import DraftRotary, rotary_embeddings
from sglang_dflash.model.vocabulary import Vocabulary, is_copy, lm_head, token_embedding

Quantization: TypeAlias = QuantizationConfig | None


class DFlashAttention(nn.Module):
    def __init__(
        self, config: DFlashConfig, layer_id: int, rotary_emb: DraftRotary, quant: Quantization
    ) -> None:
        super().__init__()
        tp_size = get_tensor_model_parallel_world_size()
        size, dim = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim, self.num_kv_heads = dim, max(1, kv_heads // tp_size)

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
        self.attn.anchor_window = view.window if view.anchored else None
        self.q_size, self.kv_size = num_heads * dim, self.num_kv_heads * dim

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


class ConvolvedLayer(DFlashLayer):
    """A layer whose sublayers have a convolution before and after them (DFlash 2)."""

    def __init__(
        self, config: DFlashConfig, layer_id: int, rotary_emb: DraftRotary, quant: Quantization
    ) -> None:
        super().__init__(config, layer_id, rotary_emb, quant)
        assert config.convolution is not None
        self.attention_conv = BlockConvolution(config.hidden_size, config.convolution)
        self.mlp_conv = BlockConvolution(config.hidden_size, config.convolution)

    def _attend(self, positions: Tensor, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        conv = self.attention_conv
        before, after = conv.kernels(hidden)
        attended = super()._attend(positions, conv.convolve(hidden, before), batch)
        return conv.convolve(attended, after)

    def _transform(self, hidden: Tensor) -> Tensor:
        conv = self.mlp_conv
        before, after = conv.kernels(hidden)
        return conv.convolve(super()._transform(conv.convolve(hidden, before)), after)


class DFlashDraftModel(nn.Module):
    """Drafts a block in one forward: embedding, layers, norm, and a choice by the LM head.

    `fc` and `hidden_norm` turn the target's features into the context that `model.context_kv`
    writes into this model's KV pool. `bind` gives it the target's vocabulary.
    """

    def __init__(
        self, config: PretrainedConfig, quant_config: Quantization = None, prefix: str = ""
    ) -> None:
        super().__init__()
        self.config = config
        self.dflash = dflash = load_config(config.dflash_path)
        layer = DFlashLayer if dflash.convolution is None else ConvolvedLayer
        self.layers = nn.ModuleList(
            layer(dflash, i, rotary_emb, quant_config)
            for i, rotary_emb in enumerate(rotary_embeddings(dflash))
        )
        self.norm = RMSNorm(dflash.hidden_size, eps=dflash.rms_norm_eps)
        self.fc = nn.Linear(
            len(dflash.target_layer_ids) * dflash.target_hidden_size, dflash.hidden_size, bias=False
        )
        self.hidden_norm = RMSNorm(dflash.hidden_size, eps=dflash.rms_norm_eps)
        if dflash.own_embedding:
            self.embed_tokens = VocabParallelEmbedding(dflash.vocab_size, dflash.hidden_size)
        if dflash.draft_vocab_size is not None:
            self.lm_head = ParallelLMHead(dflash.draft_vocab_size, dflash.hidden_size)
        if dflash.vocabulary_map:
            size = dflash.draft_vocab_size or dflash.vocab_size
            self.register_buffer("d2t", torch.zeros(size, dtype=torch.int64))
        if dflash.mask_embedding:
            self.register_buffer("mask_embedding", torch.empty(dflash.hidden_size))
            self.mask_embedding: Tensor
        if dflash.markov is not None:
            self.markov_head = KINDS[dflash.markov.kind](dflash, dflash.markov)
        if dflash.confidence is not None:
            self.confidence_head = ConfidenceHead(dflash, dflash.confidence)
        if dflash.prefix_gru is not None:
            self.prefix_gru = PrefixCell(dflash, dflash.prefix_gru)
            self.embed_proj = Correction(dflash, dflash.prefix_gru)
        if dflash.selector is not None:
            self.candidate_selector = CandidateSelector(dflash, dflash.selector)
        self.vocabulary: Vocabulary
        self.predictor: Predictor
        self.weigh: bool

    def bind(self, target: Any, kernels: Kernels, weigh: bool, width: int) -> None:
        """Take the target's vocabulary.

        weigh: compute the probability of each draft, too; width: positions that the draft reads at
        once.
        """
        self.weigh = weigh
        self._drop_copies(target)
        brought = (getattr(self, name, None) for name in ("embed_tokens", "lm_head", "d2t"))
        self.vocabulary = Vocabulary(target, kernels, *brought)
        self.predictor = self._predictor(width)
        for module in self.modules():
            if isinstance(module, BlockConvolution):
                module.width = width
        # The checkpoint's scale applies to raw embeddings. Gemma's module scales them by itself.
        scale, own = self.dflash.embedding_scale, getattr(self.vocabulary.embed, "embed_scale", 1.0)
        self._embedding_factor = 1.0 if scale is None else scale / float(own)

    def _drop_copies(self, target: Any) -> None:
        """Share the target's embedding and LM head where the checkpoint holds copies of them.

        DeepSpec's and older speculators checkpoints do, 1.2 GB each for an 8B target.
        """
        embedding, head = token_embedding(target), lm_head(target)
        raw = getattr(embedding, "embed_scale", None) is None  # Gemma's module scales by itself
        if self.dflash.own_embedding and raw and is_copy(self.embed_tokens, embedding):
            del self.embed_tokens
        mapped = self.dflash.vocabulary_map
        if self.dflash.draft_vocab_size is not None and not mapped and is_copy(self.lm_head, head):
            del self.lm_head

    def _predictor(self, width: int) -> Predictor:
        """The choice of tokens that belongs to the draft's heads."""
        config, vocabulary = self.dflash, self.vocabulary
        if config.selector is not None:
            return Selection(config, self.candidate_selector, vocabulary, width)
        if config.prefix_gru is not None:
            gru, heads = config.prefix_gru, (self.prefix_gru, self.embed_proj)
            return PrefixChain(config, gru, *heads, self._embed_tokens, vocabulary, width)
        confidence = getattr(self, "confidence_head", None)
        if config.markov is not None:
            return Chain(config, self.markov_head, confidence, vocabulary, width)
        return Independent(config, confidence, vocabulary, width)

    @torch.no_grad()  # SGLang captures graphs without it
    def forward(
        self, input_ids: Tensor, positions: Tensor, forward_batch: ForwardBatch
    ) -> LogitsProcessorOutput:
        """Draft blocks.

        input_ids: [n] int64, anchors and masks; positions: [n] int64. The result, [B * drafts]
        int64, or [B * drafts, 2] with probabilities (`Predicted.pack`), is returned as
        `hidden_states`. SGLang's graph runner returns its first n entries unchanged, and there are
        at most as many drafts as tokens. Those of padded requests come last.
        """
        hidden = self._embed(input_ids)
        residual = None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, forward_batch, residual)
        hidden, _ = self.norm(hidden, residual)
        packed = self.predictor.predict(hidden, input_ids, self.weigh).pack()
        if self.predictor.apart:
            packed = self.vocabulary.of_first_rank(packed)
        return LogitsProcessorOutput(next_token_logits=None, hidden_states=packed)

    def get_attention_sliding_window_size(self) -> int | None:
        """Tokens to the left in the widest window. SGLang's Triton backend lists KV for it."""
        lefts = [view.left for view in self.dflash.attention if view.left is not None]
        return max(lefts, default=None)

    def _embed_tokens(self, token_ids: Tensor) -> Tensor:
        """Embed tokens of a text. The mask's own embedding does not apply to them."""
        hidden: Tensor = self.vocabulary.embed(token_ids)
        return hidden if self._embedding_factor == 1.0 else hidden * self._embedding_factor

    def _embed(self, input_ids: Tensor) -> Tensor:
        hidden = self._embed_tokens(input_ids)
        if self.dflash.mask_embedding:
            is_mask = (input_ids == self.dflash.mask_token_id)[:, None]
            hidden = torch.where(is_mask, self.mask_embedding.to(hidden.dtype), hidden)
        return hidden

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load a checkpoint strictly; raises `Refusal`."""
        load(self, self.dflash, weights, default_weight_loader)


EntryClass = DFlashDraftModel
