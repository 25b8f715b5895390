"""DFlash 2: each draft is one of its position's likeliest tokens, by the draft before it.

The rule is that of z-lab's `dflash/model.py`. A candidate's score is its logit plus its edge from
the draft before. The edges of all pairs of neighbouring candidates come from one product, so only
the walk from index to index is sequential.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sglang_dflash.checkpoint.config import DFlashConfig, Selector
from sglang_dflash.model.heads.sequential import InOrder
from sglang_dflash.model.vocabulary import Candidates, Predicted, Vocabulary


class CandidateSelector(nn.Module):
    """The weights of the edges: a row of each codebook for every token of the target."""

    def __init__(self, config: DFlashConfig, selector: Selector) -> None:
        super().__init__()
        self.top_k = selector.top_k
        codebook = config.vocab_size, selector.rank
        self.predecessor_codebook = nn.Parameter(torch.empty(codebook))
        self.successor_codebook = nn.Parameter(torch.empty(codebook))
        self.hidden_projection = nn.Linear(config.hidden_size, selector.rank, bias=False)

    def fit(self, vocabulary: Vocabulary) -> None:
        """Have a row for each token of the target. Vocabularies may differ in their padding."""
        vocabulary.fit_input(self.predecessor_codebook)
        vocabulary.fit_input(self.successor_codebook)

    def edges(self, hidden: Tensor, before: Tensor, ids: Tensor) -> Tensor:
        """The score of a candidate after each possible token before it: [B, S, k, k] float32.

        hidden: [B, S, H]; before, ids: [B, S, k] int64. The last dimension is that of `ids`.
        """
        weights = self.hidden_projection(hidden).float()[:, :, None]
        left = F.embedding(before, self.predecessor_codebook).float() * weights
        right = F.embedding(ids, self.successor_codebook).float()
        return torch.matmul(left, right.transpose(2, 3))


class Selection(InOrder):
    """Drafts blocks with a candidate selector."""

    def __init__(
        self, config: DFlashConfig, selector: CandidateSelector, vocabulary: Vocabulary, width: int
    ) -> None:
        super().__init__(config, vocabulary, width)
        self._selector = selector
        selector.fit(vocabulary)

    def _blocks(self, hidden: Tensor, token_ids: Tensor, weigh: bool) -> Predicted:
        """As `InOrder._blocks`. A draft's probability is its weight among the candidates."""
        anchors, drafting = token_ids[:, :1], hidden[:, self._first :]  # [B, S, H]
        ids, logits = self._candidates(drafting)
        before = torch.cat([anchors[:, :, None].expand_as(ids[:, :1]), ids[:, :-1]], dim=1)
        scores = logits[:, :, None] + self._selector.edges(drafting, before, ids)
        best = scores.argmax(dim=3)  # [B, S, k]: the choice behind each token before
        at = torch.zeros_like(anchors)  # the anchor is every candidate before the first draft
        path = [at]
        for position in range(best.shape[1]):
            at = best[:, position].gather(1, at)
            path.append(at)
        steps = torch.cat(path, dim=1)[:, :, None]  # [B, S + 1, 1]
        drafts = ids.gather(2, steps[:, 1:]).flatten()
        if not weigh:
            return Predicted(drafts, None)
        taken = steps[:, :-1, :, None].expand(-1, -1, -1, self._selector.top_k)
        weights = scores.gather(2, taken).softmax(dim=3).amax(dim=3)  # [B, S, 1]
        return Predicted(drafts, weights.flatten())

    def _candidates(self, drafting: Tensor) -> Candidates:
        """The candidates of each position, [B, S, k] each.

        The multiplier is positive and the cap is monotone, so they are applied to candidates alone.
        """
        count, hidden = self._selector.top_k, drafting.flatten(0, 1)
        found = self._vocabulary.candidates(self._vocabulary.logits(hidden), count)
        shape = *drafting.shape[:2], count
        return Candidates(found.ids.view(shape), self._scaled(found.logits).view(shape))
