"""The draft's vocabulary: token embeddings in, the argmax of a vocabulary-parallel LM head out."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from torch import Tensor, nn

from sglang_dflash.kernels import Kernels

CERTAIN = 2**20  # a probability of 1 as an integer
TOKEN_CHUNK = 512  # tokens whose logits are alive at once; bounds memory at large batches


def language_model(model: Any) -> Any:
    """The language model of a target. Multimodal models have it as a submodule."""
    return getattr(model, "language_model", model)


def logits_processor(model: Any) -> LogitsProcessor:
    """The target's logits processor, on the model itself or on its language model."""
    return getattr(model, "logits_processor", None) or language_model(model).logits_processor


def token_embedding(model: Any) -> nn.Module:
    """The target's token embedding. `get_input_embeddings` does not always return it."""
    language = language_model(model)
    found = getattr(getattr(language, "model", language), "embed_tokens", None)
    embedding: nn.Module = found if found is not None else model.get_input_embeddings()
    return embedding


class Vocabulary:
    """The draft's embedding and LM head: its checkpoint's own, else references to the target's.

    This is not an nn.Module, so that the draft neither registers nor loads the target's weights.
    """

    def __init__(
        self,
        target: Any,
        kernels: Kernels,
        embedding: nn.Module | None = None,
        lm_head: VocabParallelEmbedding | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        """offsets: [draft vocabulary] int64, target id - draft id."""
        language = language_model(target)
        head = lm_head or getattr(language, "lm_head", None) or getattr(target, "lm_head", None)
        assert head is not None, f"{type(target).__name__} has no LM head"
        self.embed = token_embedding(target) if embedding is None else embedding
        self.lm_head = head
        self._processor, self._kernels = logits_processor(target), kernels
        self._offsets = offsets
        self._group = get_tp_group()
        self._ranks = self._group.world_size
        if isinstance(head, nn.Embedding):  # Gemma's tied head: whole on every rank
            self._columns, self._first_id, self._ranks = head.num_embeddings, 0, 1
        else:
            shard = head.shard_indices
            self._columns = shard.num_org_elements  # padding and added rows lie behind these
            self._first_id = shard.org_vocab_start_index

    def predict(self, hidden: Tensor, weigh: bool) -> Tensor:
        """Target id of the largest logit, the lowest id on a tie, the same on every rank.

        hidden: [n, H] -> [n] int64, or with `weigh` [n, 2]: the id and p * CERTAIN. Ranks exchange
        a few numbers per token, never the logits. Soft-capping and positive factors of the logits
        do not change which logit is the largest.
        """
        parts = [self._best(tokens, weigh) for tokens in hidden.split(TOKEN_CHUNK)]
        ids, values = map(torch.cat, zip(*parts, strict=True))
        if self._offsets is not None:
            ids = ids + self._offsets[ids]
        return torch.stack([ids, (values * CERTAIN).long()], dim=1) if weigh else ids

    def _best(self, hidden: Tensor, weigh: bool) -> tuple[Tensor, Tensor]:
        """Draft-vocabulary id, and its probability with `weigh`, else its logit: [n] each."""
        logits = self._processor._compute_lm_head(hidden, self.lm_head)[:, : self._columns]
        index, value, mass = self._kernels.largest(logits, weigh)
        if self._ranks == 1:
            return index, value if mass is None else mass.reciprocal()
        # float32 holds ids below 2**24 exactly
        ours = [value, (index + self._first_id).float()] + ([] if mass is None else [mass])
        best = torch.stack(ours, dim=1)
        ranks = self._group.all_gather(best[None], dim=0)  # [ranks, n, 2 or 3]
        first = ranks[:, :, 0].argmax(dim=0)  # first rank of a tie: lowest ids
        value, index = ranks[first, torch.arange(len(first), device=first.device), :2].unbind(1)
        if weigh:
            value = (ranks[:, :, 2] * (ranks[:, :, 0] - value).exp()).sum(dim=0).reciprocal()
        return index.long(), value
