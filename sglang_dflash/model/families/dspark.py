"""DSpark: each position's logits get a bias by the token before it, so a block is drafted in order.

The rules are those of DeepSpec, deepspec/modeling/dspark. Only the bias, of a low rank, waits for
the token before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.checkpoint.formats.dspark import DSpark, Markov
from sglang_dflash.method.noise import DraftNoise
from sglang_dflash.model.families import dflash
from sglang_dflash.model.head import DraftHead
from sglang_dflash.model.lm_head import Prediction, Vocabulary


class MarkovHead(nn.Module):
    """The bias of a token's logits: `markov_w2` times a latent of the token before ("vanilla").

    Kinds differ in the latent. It may read the hidden state, [B, H], and a state that begins at
    None in every block. The part that reads hidden states alone is computed for all positions at
    once.
    """

    def __init__(self, config: DFlashConfig, markov: Markov) -> None:
        super().__init__()
        self.rank = markov.rank
        self.markov_w1 = nn.Embedding(config.vocab_size, markov.rank)
        self.markov_w2 = nn.Linear(markov.rank, config.columns, bias=False)

    def fit(self, vocabulary: Vocabulary) -> None:
        """Keep the rows that this rank needs."""
        vocabulary.fit_input(self.markov_w1.weight)
        vocabulary.fit_output(self.markov_w2.weight)

    def of_hidden(self, hidden: Tensor) -> Tensor:
        """The part of all latents that depends on hidden states alone: [B, N, H] -> [B, N, ..]."""
        return hidden

    def latent(
        self, row: Tensor, of_hidden: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The latent, [B, r], and the next state.

        row: [B, r], `markov_w1` of the token before; of_hidden: [B, ..] of this position.
        """
        return row, None


class GatedMarkovHead(MarkovHead):
    """The latent is the row times a gate, which reads the hidden state and the row."""

    def __init__(self, config: DFlashConfig, markov: Markov) -> None:
        super().__init__(config, markov)
        self.gate_proj = nn.Linear(config.hidden_size + markov.rank, markov.rank)

    def of_hidden(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.gate_proj.weight[:, : -self.rank], self.gate_proj.bias)

    def latent(
        self, row: Tensor, of_hidden: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        weight = self.gate_proj.weight[:, -self.rank :]
        return torch.addmm(of_hidden, row, weight.T).sigmoid() * row, None


class RNNMarkovHead(MarkovHead):
    """The latent is the output of a gated recurrent cell over the tokens of the block."""

    def __init__(self, config: DFlashConfig, markov: Markov) -> None:
        super().__init__(config, markov)
        self.joint_proj = nn.Linear(2 * markov.rank + config.hidden_size, 3 * markov.rank)

    def of_hidden(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.joint_proj.weight[:, 2 * self.rank :], self.joint_proj.bias)

    def latent(
        self, row: Tensor, of_hidden: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        state = torch.zeros_like(row) if state is None else state
        weight = self.joint_proj.weight[:, : 2 * self.rank]
        joint = torch.addmm(of_hidden, torch.cat([state, row], dim=1), weight.T)  # [B, 3 r]
        gate, others = joint.split([self.rank, 2 * self.rank], dim=1)
        candidate, output = others.tanh().chunk(2, dim=1)
        return output, torch.lerp(candidate, state, gate.sigmoid())


KINDS = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RNNMarkovHead}


class ConfidenceHead(nn.Module):
    """The probability that a draft is accepted, given that all drafts before it are."""

    def __init__(self, config: DFlashConfig, family: DSpark) -> None:
        super().__init__()
        self.rank = family.confidence_rank
        self.proj = nn.Linear(config.hidden_size + self.rank, 1)

    def forward(self, hidden: Tensor, markov_rows: Tensor | None = None) -> Tensor:
        """[n] float32.

        hidden: [n, H]; markov_rows: [n, r], `markov_w1` of each token before, if the draft has it.
        """
        inputs = hidden
        if self.rank:
            assert markov_rows is not None
            inputs = torch.cat([hidden, markov_rows], dim=1)
        logits: Tensor = self.proj(inputs)
        return logits.squeeze(1).float().sigmoid()


class Chain(DraftHead):
    """Drafts the positions of a block one after another, each with a bias by the token before."""

    def __init__(self, config: DFlashConfig, family: DSpark, markov: Markov) -> None:
        super().__init__(config)
        self.markov_head = KINDS[markov.kind](config, markov)
        self.confidence_head = None
        if family.confidence is not None:
            self.confidence_head = ConfidenceHead(config, family)

    def bind(self, *given: Any) -> None:
        super().bind(*given)
        self.markov_head.fit(self.vocabulary)

    def blocks(
        self, hidden: Tensor, token_ids: Tensor, return_probs: bool, noise: DraftNoise
    ) -> Prediction:
        markov = self.markov_head
        confidence = self.confidence_head
        first = self.config.first_drafting
        of_hidden = markov.of_hidden(hidden).unbind(1)
        drafting = hidden[:, first:]
        logits = self.logits(drafting).unbind(1)
        w1, w2 = markov.markov_w1.weight, markov.markov_w2.weight
        token = token_ids[:, 0]  # [B], the anchors
        state = None
        drafts, markov_rows = [], []
        for position in range(self.width):
            row = w1.index_select(0, token)
            latent, state = markov.latent(row, of_hidden[position], state)
            if position < first:
                continue  # the head's state advances, and the anchor is also before the first draft
            n = position - first
            biased = self.vocabulary.biased_largest(
                logits[n], latent, w2, return_probs and confidence is None, noise.at(n)
            )
            token = biased.ids
            drafts.append(biased)
            markov_rows.append(row)
        found = Prediction.of_blocks(drafts)
        if not return_probs or confidence is None:
            return found
        before = torch.stack(markov_rows, dim=1).flatten(0, 1)
        return found._replace(probabilities=confidence(drafting.flatten(0, 1), before))


class Confident(dflash.Head):
    """Predicts each position by itself, and weighs it by the confidence head."""

    def __init__(self, config: DFlashConfig, family: DSpark) -> None:
        super().__init__(config)
        self.confidence_head = ConfidenceHead(config, family)

    def bind(self, *given: Any) -> None:
        super().bind(*given)
        self.rank_local = True

    def blocks(
        self, hidden: Tensor, token_ids: Tensor, return_probs: bool, noise: DraftNoise
    ) -> Prediction:
        found = super().blocks(hidden, token_ids, False, noise)
        if not return_probs:
            return found
        drafting = self.drafting(hidden).flatten(0, 1)
        return found._replace(probabilities=self.confidence_head(drafting))


def head(config: DFlashConfig) -> DraftHead:
    family = config.family
    assert isinstance(family, DSpark)
    if family.markov is None:
        return Confident(config, family)
    return Chain(config, family, family.markov)
