"""The draft: Qwen3-shaped layers that attend to the block and its context."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from itertools import chain
from typing import Any

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import Tensor, nn
from transformers import PretrainedConfig

from sglang_dflash.checkpoint import load_config
from sglang_dflash.checkpoint.loading import load
from sglang_dflash.checkpoint.mask_embedding import read_mask_embedding
from sglang_dflash.kernels import Kernels
from sglang_dflash.method.noise import DraftNoise, NoiseTable
from sglang_dflash.model.head import DraftHead
from sglang_dflash.model.layers import DFlashLayer, Quantization
from sglang_dflash.model.lm_head import Vocabulary
from sglang_dflash.model.rope import rotary_embeddings
from sglang_dflash.model.target_parts import holds, is_copy, lm_head, token_embedding


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
        family = import_module(f"sglang_dflash.model.families.{dflash.family.module}")
        layer = family.layer(dflash) if hasattr(family, "layer") else DFlashLayer
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
            self.register_buffer("d2t", torch.zeros(dflash.columns, dtype=torch.int64))
        if dflash.mask_embedding:
            self.register_buffer("mask_embedding", torch.empty(dflash.hidden_size))
            self.mask_embedding: Tensor
        self.head: DraftHead = family.head(dflash)
        self.vocabulary: Vocabulary
        self.noise: NoiseTable  # of the target's draws
        self.return_probs: bool

    def bind(self, target: Any, kernels: Kernels, return_probs: bool, width: int) -> None:
        """Take the target's vocabulary.

        return_probs: compute the probability of each draft, too; width: positions that the draft
        reads at once.
        """
        self.return_probs = return_probs
        self._drop_copies(target)
        brought = (getattr(self, name, None) for name in ("embed_tokens", "lm_head", "d2t"))
        self.vocabulary = Vocabulary(target, kernels, *brought)
        self.head.bind(self.vocabulary, self._embed_tokens, self.norm.forward, width)
        self.head.weights_loaded()
        for layer in self.layers:
            assert isinstance(layer, DFlashLayer)
            layer.block_width = width
        # The checkpoint's scale applies to raw embeddings. Gemma's module scales them by itself.
        scale = self.dflash.embedding_scale
        own = getattr(self.vocabulary.embed, "embed_scale", 1.0)
        self._embedding_factor = 1.0 if scale is None else scale / float(own)

    def keep(self, noise: NoiseTable) -> None:
        """Take the noise of the target's draws, and make room for what the head keeps beside it.

        Requests have the same rows there.
        """
        self.noise = noise
        self.head.make_room(len(noise.seeds))

    def _drop_copies(self, target: Any) -> None:
        """Share the target's embedding and LM head where the checkpoint holds copies of them.

        DeepSpec's and older speculators checkpoints do, 1.2 GB each for an 8B target.
        """
        embedding = token_embedding(target)
        head = lm_head(target)
        self._shared: dict[str, nn.Module] = {}
        raw = getattr(embedding, "embed_scale", None) is None  # Gemma's module scales by itself
        if self.dflash.own_embedding and raw and is_copy(self.embed_tokens, embedding):
            del self.embed_tokens
            self._shared["embed_tokens.weight"] = embedding
        mapped = self.dflash.vocabulary_map
        if self.dflash.draft_vocab_size is not None and not mapped and is_copy(self.lm_head, head):
            del self.lm_head
            self._shared["lm_head.weight"] = head

    @torch.no_grad()  # SGLang captures graphs without it
    def forward(
        self, input_ids: Tensor, positions: Tensor, forward_batch: ForwardBatch
    ) -> LogitsProcessorOutput:
        """Draft blocks.

        input_ids: [n] int64, anchors and masks; positions: [n] int64. The result, [B * drafts, ..]
        int64 (`Prediction.pack`), is returned as `hidden_states`. SGLang's graph runner returns its
        first n entries unchanged, and there are at most as many drafts as tokens. Those of padded
        requests come last.
        """
        hidden = self._embed(input_ids)
        residual = None
        for i, layer in enumerate(self.layers):
            hidden, residual = layer(positions, hidden, forward_batch, residual)
            hidden, residual = self.head.after_layer(i, hidden, residual, input_ids)
        hidden, _ = self.norm(hidden, residual)
        anchors = positions.view(-1, self.head.width)[:, 0]
        rows = forward_batch.req_pool_indices
        noise = DraftNoise.after(self.noise, rows, anchors, self.vocabulary.ids)
        packed = self.head.predict(hidden, input_ids, self.return_probs, noise).pack()
        if self.head.rank_local:
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
        if self.dflash.mask_embedding:
            weights = chain(weights, [("mask_embedding", read_mask_embedding(self.dflash))])
        load(self, self.dflash, weights, default_weight_loader)

    def unshared(self, weights: Mapping[str, Tensor]) -> str | None:
        """The name of a part that is shared with the target, and that has other weights here.

        weights: as for `reload`.
        """
        return next((n for n, own in self._shared.items() if not holds(own, weights[n])), None)

    def reload(self, weights: Mapping[str, Tensor]) -> None:
        """Load other weights into the same memory, which graphs read.

        weights: all of a checkpoint by the model's own names, as `checkpoint.new_weights` returns
        them, with nothing `unshared`. They may be on any device.
        """
        own = {name: tensor for name, tensor in weights.items() if name not in self._shared}
        load(self, self.dflash, own.items(), default_weight_loader)
        self.head.weights_loaded()
        self.vocabulary.read_offsets()


EntryClass = DFlashDraftModel
