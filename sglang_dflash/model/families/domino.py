"""Domino: a GRU over the drafted tokens corrects each position's logits, in the block's order.

The rules are those of SpecForge, specforge/modeling/draft/domino.py. Only the GRU and the
correction wait for the token before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.checkpoint.formats.domino import Domino
from sglang_dflash.method.noise import DraftNoise
from sglang_dflash.model.head import DraftHead
from sglang_dflash.model.lm_head import Prediction


class PrefixCell(nn.Module):
    """One step of a GRU without biases. Its weights stack the gates as PyTorch does: r, z, n."""

    def __init__(self, config: DFlashConfig, family: Domino) -> None:
        super().__init__()
        size = family.gru_hidden_dim
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * size, config.hidden_size))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * size, size))

    def forward(self, embedding: Tensor, state: Tensor) -> Tensor:
        """The next state, [B, G].

        embedding: [B, H] of the token; state: [B, G].
        """
        # On CUDA two GEMMs and a fused kernel. cuDNN's GRU is for sequences.
        return torch.gru_cell(embedding, state, self.weight_ih_l0, self.weight_hh_l0)


class Correction(nn.Sequential):
    """The term that is added to a draft's logits: two layers over [hidden state; GRU state]."""

    def __init__(self, config: DFlashConfig, family: Domino) -> None:
        super().__init__(
            nn.Linear(config.hidden_size + family.gru_hidden_dim, family.emb_dim, bias=False),
            nn.SiLU(),
            nn.Linear(family.emb_dim, config.columns, bias=False),
        )
        self.hidden_size = config.hidden_size

    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """The parts of the first layer, [E, H] and transposed [G, E], and the second, [columns, E].

        The first part is of the hidden state, the second one of the GRU state.
        """
        inner = self.get_parameter("0.weight")
        size = self.hidden_size
        return inner[:, :size], inner[:, size:].T, self.get_parameter("2.weight")


class PrefixChain(DraftHead):
    """Drafts the positions of a block one after another, each corrected by all tokens before it."""

    def __init__(self, config: DFlashConfig, family: Domino) -> None:
        super().__init__(config)
        self.family = family
        self.prefix_gru = PrefixCell(config, family)
        self.embed_proj = Correction(config, family)

    def bind(self, *given: Any) -> None:
        super().bind(*given)
        self.vocabulary.fit_output(self.embed_proj.get_parameter("2.weight"))

    def blocks(
        self, hidden: Tensor, token_ids: Tensor, return_probs: bool, noise: DraftNoise
    ) -> Prediction:
        # A block has N - 1 drafts either way. The position that predicts none is not looked at.
        predicting = slice(0, self.width - 1) if self.family.shifted else slice(1, self.width)
        hidden = hidden[:, predicting].contiguous()
        by_hidden, by_state, outer = self.embed_proj.weights()
        of_hidden = F.linear(hidden, by_hidden).unbind(1)  # [B, E] of each draft
        logits = self.logits(hidden).unbind(1)
        token = token_ids[:, 0]  # [B], the anchors
        state = hidden.new_zeros(len(token_ids), self.family.gru_hidden_dim)
        drafts = []
        for n in range(self.width - 1):
            state = self.prefix_gru(self.embed(token), state)
            here = noise.at(n)
            if n < self.family.pure_prefix:
                draft = self.vocabulary.largest(logits[n], return_probs, here)
            else:
                inner = F.silu(torch.addmm(of_hidden[n], state, by_state))
                draft = self.vocabulary.biased_largest(logits[n], inner, outer, return_probs, here)
            drafts.append(draft)
            token = draft.ids
        return Prediction.of_blocks(drafts)


def head(config: DFlashConfig) -> DraftHead:
    assert isinstance(config.family, Domino)
    return PrefixChain(config, config.family)
