"""The common part of families that draft the positions of a block one after another.

All logits of a block come from one GEMM. A head adds to those of each position by the tokens before
it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dflash.model.head import DraftHead
from sglang_dflash.model.lm_head import TOKEN_CHUNK, Prediction


class SequentialHead(DraftHead):
    """Walks over the positions of blocks."""

    def predict(self, hidden: Tensor, token_ids: Tensor, return_probs: bool) -> Prediction:
        size = max(1, TOKEN_CHUNK // self.width)  # blocks whose logits are alive at once
        states = hidden.view(-1, self.width, hidden.shape[1]).split(size)
        ids = token_ids.view(-1, self.width).split(size)
        parts = [self.blocks(*blocks, return_probs) for blocks in zip(states, ids, strict=True)]
        return Prediction.cat(parts)

    def blocks(self, hidden: Tensor, token_ids: Tensor, return_probs: bool) -> Prediction:
        """The drafts of B blocks, [B * drafts].

        hidden: [B, N, H]; token_ids: [B, N] int64.
        """
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits that a head adds to: [B, M, H] -> [B, M, columns]."""
        logits = self.scaled(self.vocabulary.logits(hidden.flatten(0, 1)))
        return logits.view(*hidden.shape[:2], self.vocabulary.columns)

    def scaled(self, logits: Tensor) -> Tensor:
        """The LM head's output, multiplied and then capped as the checkpoint says."""
        if self.config.logit_multiplier != 1.0:
            logits = logits * self.config.logit_multiplier
        cap = self.config.logit_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap
