"""DFlash: each position is predicted by itself."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sglang_dflash.model.head import DraftHead
from sglang_dflash.model.lm_head import Prediction


class Head(DraftHead):
    def bind(self, *given: Any) -> None:
        super().bind(*given)
        self.rank_local = self.vocabulary.whole_head

    def predict(self, hidden: Tensor, token_ids: Tensor, return_probs: bool) -> Prediction:
        return self.vocabulary.predict(self.drafting(hidden), return_probs)

    def drafting(self, hidden: Tensor) -> Tensor:
        """The hidden states that drafts are predicted from: [n, H] -> [B * drafts, H]."""
        blocks = hidden.view(-1, self.width, hidden.shape[1])
        return blocks[:, self.config.first_drafting :].flatten(0, 1)


head = Head
