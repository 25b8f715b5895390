"""Domino: a GRU over the drafted tokens corrects each position's logits, in the block's order.

The rules are those of SpecForge, specforge/modeling/draft/domino.py. Only the GRU and the
correction wait for the token before.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sglang_dflash.checkpoint.config import DFlashConfig, PrefixGRU
from sglang_dflash.model.heads.sequential import InOrder
from sglang_dflash.model.vocabulary import Predicted, Vocabulary


class PrefixCell(nn.Module):
    """One step of a GRU without biases. Its weights stack the gates as PyTorch does: r, z, n."""

    def __init__(self, config: DFlashConfig, gru: PrefixGRU) -> None:
        super().__init__()
        size = gru.gru_hidden_dim
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

    def __init__(self, config: DFlashConfig, gru: PrefixGRU) -> None:
        columns = config.draft_vocab_size or config.vocab_size
        super().__init__(
            nn.Linear(config.hidden_size + gru.gru_hidden_dim, gru.emb_dim, bias=False),
            nn.SiLU(),
            nn.Linear(gru.emb_dim, columns, bias=False),
        )
        self.hidden_size = config.hidden_size

    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """The parts of the first layer, [E, H] and transposed [G, E], and the second, [columns, E].

        The first part is of the hidden state, the second one of the GRU state.
        """
        inner = self.get_parameter("0.weight")
        size = self.hidden_size
        return inner[:, :size], inner[:, size:].T, self.get_parameter("2.weight")


class PrefixChain(InOrder):
    """Drafts the positions of a block one after another, each corrected by all tokens before it."""

    def __init__(
        self,
        config: DFlashConfig,
        gru: PrefixGRU,
        cell: PrefixCell,
        correction: Correction,
        embed: Callable[[Tensor], Tensor],
        vocabulary: Vocabulary,
        width: int,
    ) -> None:
        """embed: token ids, [B] int64 -> the embeddings that the GRU reads, [B, H].

        width: positions N that the draft reads at once, the same for every request.
        """
        super().__init__(config, vocabulary, width)
        self._cell, self._correction, self._embed = cell, correction, embed
        self._state_size, self._pure_prefix = gru.gru_hidden_dim, gru.pure_prefix
        # A block has N - 1 drafts either way. The position that predicts none is not looked at.
        self._predicting = slice(0, width - 1) if gru.shifted else slice(1, width)
        vocabulary.fit_output(correction.get_parameter("2.weight"))

    def _blocks(self, hidden: Tensor, token_ids: Tensor, weigh: bool) -> Predicted:
        vocabulary, hidden = self._vocabulary, hidden[:, self._predicting].contiguous()
        by_hidden, by_state, outer = self._correction.weights()
        of_hidden = F.linear(hidden, by_hidden).unbind(1)  # [B, E] of each draft
        logits = self._logits(hidden).unbind(1)
        token = token_ids[:, 0]  # [B], the anchors
        state = hidden.new_zeros(len(token_ids), self._state_size)
        drafts = []
        for n in range(self._width - 1):
            state = self._cell(self._embed(token), state)
            if n < self._pure_prefix:
                draft = vocabulary.largest(logits[n], weigh)
            else:
                inner = F.silu(torch.addmm(of_hidden[n], state, by_state))
                draft = vocabulary.biased_largest(logits[n], inner, outer, weigh)
            drafts.append(draft)
            token = draft.ids
        return Predicted.of_blocks(drafts)
