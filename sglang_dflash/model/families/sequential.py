"""The common part of families that draft the positions of a block one after another.

All logits of a block come from one GEMM. A head adds to those of each position by the tokens before
it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.model.vocabulary import TOKEN_CHUNK, Predicted, Vocabulary


class InOrder:
    """A predictor that walks over the positions of blocks."""

    apart = True

    def __init__(self, config: DFlashConfig, vocabulary: Vocabulary, width: int) -> None:
        """width: positions N that the draft reads at once, the same for every request."""
        self._vocabulary, self._width = vocabulary, width
        self._first = config.first_drafting
        self._multiplier, self._cap = config.logit_multiplier, config.logit_cap

    def predict(self, hidden: Tensor, token_ids: Tensor, weigh: bool) -> Predicted:
        """As `Predictor.predict`."""
        width = self._width
        size = max(1, TOKEN_CHUNK // width)  # blocks whose logits are alive at once
        states = hidden.view(-1, width, hidden.shape[1]).split(size)
        ids = token_ids.view(-1, width).split(size)
        parts = [self._blocks(*blocks, weigh) for blocks in zip(states, ids, strict=True)]
        return Predicted.cat(parts)

    def _blocks(self, hidden: Tensor, token_ids: Tensor, weigh: bool) -> Predicted:
        """The drafts of B blocks, [B * drafts].

        hidden: [B, N, H]; token_ids: [B, N] int64.
        """
        raise NotImplementedError

    def _logits(self, hidden: Tensor) -> Tensor:
        """The logits that a head adds to: [B, M, H] -> [B, M, columns]."""
        logits = self._scaled(self._vocabulary.logits(hidden.flatten(0, 1)))
        return logits.view(*hidden.shape[:2], self._vocabulary.columns)

    def _scaled(self, logits: Tensor) -> Tensor:
        """The LM head's output, multiplied and then capped as the checkpoint says."""
        if self._multiplier != 1.0:
            logits = logits * self._multiplier
        return logits if self._cap is None else torch.tanh(logits / self._cap) * self._cap
