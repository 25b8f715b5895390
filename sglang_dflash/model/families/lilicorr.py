"""LiLiCorr: drafts are chosen among candidates, by a transformer over those of all positions.

The context of the token before the anchor is kept from one step to the next.
"""

from __future__ import annotations

from torch import Tensor

from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.checkpoint.formats.lilicorr import LiLiCorr
from sglang_dflash.method.noise import DraftNoise
from sglang_dflash.model.candidates import CandidateTransformer
from sglang_dflash.model.families import dflash2
from sglang_dflash.model.head import DraftHead
from sglang_dflash.model.lm_head import Prediction
from sglang_dflash.model.walk import walk


class Head(DraftHead):
    reads_last_context = True

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        assert isinstance(config.family, LiLiCorr)
        self._top_k = config.family.top_k
        self.lilicorr = CandidateTransformer(
            config.family, config.hidden_size, config.draft_width, config.rms_norm_eps
        )

    def blocks(
        self, hidden: Tensor, token_ids: Tensor, return_probs: bool, noise: DraftNoise
    ) -> Prediction:
        drafting = hidden[:, 1:]  # [B, S, H]
        found = self.vocabulary.likeliest(
            self.vocabulary.logits(drafting.flatten(0, 1)), self._top_k
        )
        shape = *drafting.shape[:2], self._top_k
        ids = found.ids.view(shape)
        embedded = self.vocabulary.embed_as_target(ids.flatten()).view(*shape, -1)
        context = self.last_context.index_select(0, noise.rows)
        scores = self.lilicorr(embedded, found.log_probs.view(shape), drafting, context)
        return walk(self.vocabulary.kernels, ids, scores, return_probs, noise)


head = Head
layer = dflash2.layer
