"""DSpine: causal blocks in which each position learns after every layer from the one before it.

A position tells its feature (`model/injection.py`), and the anchor its own code. After the last
layer, a position hears each candidate of the position before it, by the candidate's code, and
scores its own candidates by the LM head. So an edge is a whole logit, and nothing is left of the LM
head's own logits but the choice of the candidates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.checkpoint.formats.dspine import DSpine
from sglang_dflash.method.noise import DraftNoise
from sglang_dflash.model.head import DraftHead
from sglang_dflash.model.injection import Injection
from sglang_dflash.model.lm_head import Prediction
from sglang_dflash.model.walk import before_each, walk


class Head(DraftHead):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        assert isinstance(config.family, DSpine)
        self._family = config.family
        self._last = config.num_layers - 1
        self.injection = Injection(
            config.hidden_size, config.num_layers, config.family.rank, config.family.message_size
        )
        self.transfer_codes = nn.Parameter(torch.empty(config.vocab_size, config.family.rank))
        self._told_nothing: Tensor  # [n, H], the last layer's output before it is added to

    def bind(self, *given: Any) -> None:
        super().bind(*given)
        self.vocabulary.fit_input(self.transfer_codes)

    def weights_loaded(self) -> None:
        self.transfer_codes.data *= self._family.rank**0.5  # as long as the features

    def after_layer(
        self, layer: int, hidden: Tensor, residual: Tensor, token_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        output = hidden + residual
        if layer == self._last:
            self._told_nothing = output.clone()  # the norm behind it works in place
        blocks = output.view(-1, self.width, output.shape[1])[:, 1:]
        feature = self.injection.feature(blocks, layer)
        anchors = self._codes(token_ids.view(-1, self.width)[:, :1])
        before = torch.cat([anchors, feature[:, :-1]], dim=1)
        heard = self.injection.heard(blocks, feature, before, layer)
        return F.pad(heard, (0, 0, 1, 0)).view_as(output), output

    def predict(
        self, hidden: Tensor, token_ids: Tensor, return_probs: bool, noise: DraftNoise
    ) -> Prediction:
        both = torch.cat([hidden, self._told_nothing], dim=1)
        del self._told_nothing
        return super().predict(both, token_ids, return_probs, noise)

    def blocks(
        self, hidden: Tensor, token_ids: Tensor, return_probs: bool, noise: DraftNoise
    ) -> Prediction:
        """As `DraftHead.blocks`. hidden: [B, N, 2 * H], beside it that of `_told_nothing`."""
        drafting, told_nothing = hidden[:, 1:].chunk(2, dim=2)  # [B, S, H] each
        ids = self.vocabulary.candidates(
            self.vocabulary.logits(drafting.flatten(0, 1)), self._family.top_k
        ).ids.view(*drafting.shape[:2], -1)
        refined = self._refined(told_nothing, before_each(ids, token_ids[:, :1]))
        scores = self.scaled(self.vocabulary.scores(refined, ids))
        return walk(self.vocabulary.kernels, ids, scores, return_probs, noise)

    def _refined(self, hidden: Tensor, before: Tensor) -> Tensor:
        """What the LM head reads behind each token: [B, S, k, H].

        hidden: [B, S, H]; before: [B, S, k] int64, the tokens.
        """
        hidden = hidden[:, :, None]
        feature = self.injection.feature(hidden, self._last)
        heard = self.injection.heard(hidden, feature, self._codes(before), self._last)
        refined = hidden + heard
        return self.norm(refined.flatten(0, 2)).view_as(refined)

    def _codes(self, token_ids: Tensor) -> Tensor:
        """What tokens tell, of the norm sqrt(R): [..] int64 -> [.., R]."""
        return F.embedding(token_ids, self.transfer_codes)


head = Head
