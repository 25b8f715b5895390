"""From the hidden states of whole blocks to their drafts."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from sglang_dflash.checkpoint.config import Confidence, DFlashConfig
from sglang_dflash.model.vocabulary import Predicted, Vocabulary


class Predictor(Protocol):
    """A draft family's choice of tokens. It runs inside the draft's graph."""

    # Ranks compute some of the result each by itself, so that its last bits may differ.
    apart: bool

    def predict(self, hidden: Tensor, token_ids: Tensor, weigh: bool) -> Predicted:
        """Choose the drafts of B blocks, one block after another: [B * drafts].

        hidden: [n, H], final-normed, n = B * width; token_ids: [n] int64, anchors and masks; weigh:
        compute the probability of each draft, too.
        """


class ConfidenceHead(nn.Module):
    """The probability that a draft is accepted, given that all drafts before it are."""

    def __init__(self, config: DFlashConfig, confidence: Confidence) -> None:
        super().__init__()
        rank = config.markov.rank if config.markov and confidence.with_markov else 0
        self.with_markov = confidence.with_markov
        self.proj = nn.Linear(config.hidden_size + rank, 1)

    def forward(self, hidden: Tensor, markov_rows: Tensor | None = None) -> Tensor:
        """[n] float32.

        hidden: [n, H]; markov_rows: [n, r], `markov_w1` of each token before, if the draft has it.
        """
        inputs = hidden
        if self.with_markov:
            assert markov_rows is not None
            inputs = torch.cat([hidden, markov_rows], dim=1)
        logits: Tensor = self.proj(inputs)
        return logits.squeeze(1).float().sigmoid()


class Independent:
    """DFlash: each position is predicted by itself."""

    def __init__(
        self,
        config: DFlashConfig,
        confidence: ConfidenceHead | None,
        vocabulary: Vocabulary,
        width: int,
    ) -> None:
        """width: positions that the draft reads at once, the same for every request."""
        self._vocabulary, self._confidence = vocabulary, confidence
        self._width, self._first = width, config.first_drafting
        self.apart = confidence is not None or vocabulary.whole_head

    def predict(self, hidden: Tensor, token_ids: Tensor, weigh: bool) -> Predicted:
        """As `Predictor.predict`."""
        blocks = hidden.view(-1, self._width, hidden.shape[1])
        hidden = blocks[:, self._first :].flatten(0, 1)
        if self._confidence is None or not weigh:
            return self._vocabulary.predict(hidden, weigh)
        ids = self._vocabulary.predict(hidden, weigh=False).ids
        return Predicted(ids, self._confidence(hidden))
