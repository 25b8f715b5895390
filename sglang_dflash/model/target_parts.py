"""The parts of a target that the draft shares: its embedding, LM head and logits processor."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.lora.layers import BaseLayerWithLoRA
from torch import Tensor, nn

ROWS_AT_ONCE = 4096  # of a vocabulary, compared on the device


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
    return _without_adapters(found if found is not None else model.get_input_embeddings())


def lm_head(model: Any) -> nn.Module:
    """The LM head of a target, on its language model or on the model itself."""
    head = getattr(language_model(model), "lm_head", None) or getattr(model, "lm_head", None)
    assert head is not None, f"{type(model).__name__} has no LM head"
    return _without_adapters(head)


def _without_adapters(module: nn.Module) -> nn.Module:
    """The module itself. LoRA puts a module around it that reads the batch of the target."""
    return module.base_layer if isinstance(module, BaseLayerWithLoRA) else module


def is_copy(own: nn.Module, targets: nn.Module) -> bool:
    """Whether two parts of the vocabulary hold the same weights for the same ids."""
    ours, theirs = (getattr(module, "weight", None) for module in (own, targets))
    if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):  # quantised
        return False
    same_ids = getattr(own, "shard_indices", None) == getattr(targets, "shard_indices", None)
    alike = ours.shape == theirs.shape and ours.dtype == theirs.dtype
    return same_ids and alike and torch.equal(ours, theirs)


def holds(part: nn.Module, whole: Tensor) -> bool:
    """Whether this rank's part of the vocabulary has these weights.

    part: with unquantised weights; whole: [tokens, H], of all ranks.
    """
    ours: Any = part.weight
    shard = getattr(part, "shard_indices", None)
    start, end = (0, len(whole))
    if shard is not None:
        start, end = shard.org_vocab_start_index, shard.org_vocab_end_index
    rows = whole[start:end]
    pairs = zip(ours.split(ROWS_AT_ONCE), rows.split(ROWS_AT_ONCE), strict=False)
    return all(torch.equal(a[: len(b)], b.to(a)) for a, b in pairs)
