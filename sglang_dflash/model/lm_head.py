"""The target's vocabulary: embedding and LM head, shared by reference with the draft."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from torch import Tensor, nn

ROW_CHUNK = 512  # rows whose logits are alive at once; bounds memory at large batches


class TargetVocabulary:
    """Embeds block tokens and takes the argmax of the vocabulary-parallel LM head.

    No nn.Module, so that the draft neither registers nor loads the target's weights.
    """

    def __init__(
        self, embedding: nn.Module, lm_head: VocabParallelEmbedding, processor: LogitsProcessor
    ) -> None:
        self.embed = embedding
        self.lm_head = lm_head
        self._processor = processor
        shard = lm_head.shard_indices
        self._columns = shard.num_org_elements  # padding and added rows lie behind these
        self._first_id = shard.org_vocab_start_index
        self._group = get_tp_group()

    @classmethod
    def of(cls, model: Any) -> TargetVocabulary:
        """The vocabulary of a target model; multimodal models keep it on their language model."""
        language = getattr(model, "language_model", model)
        head = getattr(language, "lm_head", None) or getattr(model, "lm_head", None)
        processor = getattr(model, "logits_processor", None) or language.logits_processor
        assert hasattr(head, "shard_indices"), (
            f"{type(model).__name__} has no vocabulary-parallel head"
        )
        return cls(model.get_input_embeddings(), head, processor)

    def argmax(self, hidden: Tensor) -> Tensor:
        """Token of the largest logit, the lowest id on a tie, the same on every rank.

        hidden: [n, H] -> [n] int64. Ranks exchange one (value, id) pair a row, never the logits.
        """
        return torch.cat([self._argmax(rows) for rows in hidden.split(ROW_CHUNK)])

    def _argmax(self, hidden: Tensor) -> Tensor:
        logits = self._processor._compute_lm_head(hidden, self.lm_head)
        value, index = logits[:, : self._columns].max(dim=-1)
        if self._group.world_size == 1:
            return index
        # float32 holds ids below 2**24 exactly
        pair = torch.stack([value.float(), (index + self._first_id).float()], dim=1)  # [n, 2]
        pairs = self._group.all_gather(pair[None], dim=0)  # [ranks, n, 2]
        rank = pairs[:, :, 0].argmax(dim=0)  # first rank of a tie: lowest ids
        return pairs[:, :, 1].gather(0, rank[None]).squeeze(0).long()
