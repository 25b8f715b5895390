"""DFlash: each position is predicted by itself."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sglang_dflash.method.noise import DraftNoise
from sglang_dflash.model.head import DraftHead
from sglang_dflash.model.lm_head import Prediction


class Head(DraftHead):
    def bind(self, *given: Any) -> None:
        super().bind(*given)
        self.rank_local = self.vocabulary.whole_head

    def blocks(
        self, hidden: Tensor, token_ids: Tensor, return_probs: bool, noise: DraftNoise
    ) -> Prediction:
        logits = self.logits(self.drafting(hidden))
        return self.vocabulary.largest(logits.flatten(0, 1), return_probs, noise)

    def drafting(self, hidden: Tensor) -> Tensor:
        """The hidden states that drafts are predicted from: [B, N, H] -> [B, drafts, H]."""
        return hidden[:, self.config.first_drafting :]


head = Head
