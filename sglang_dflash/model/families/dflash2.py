"""DFlash 2: convolutions along the block, and drafts that are chosen among candidates.

The rules are those of z-lab's `dflash/model.py`. A kernel is a trained one plus one that is
projected from the sublayer's normed input and shared by the channels of a group. Nothing crosses
the bounds of a block, so a convolution keeps nothing between steps. The context is not convolved.

A candidate's score is its logit plus its edge from the draft before. The edges of all pairs of
neighbouring candidates come from one product.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch import Tensor, nn
from torch.nn import functional as F

from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.checkpoint.formats.dflash2 import Convolution, DFlash2, Selector
from sglang_dflash.method.noise import DraftNoise
from sglang_dflash.model.families import dflash
from sglang_dflash.model.head import DraftHead
from sglang_dflash.model.layers import DFlashLayer, Quantization
from sglang_dflash.model.lm_head import Candidates, Prediction, Vocabulary
from sglang_dflash.model.rope import DraftRotary
from sglang_dflash.model.walk import before_each, walk


class BlockConvolution(nn.Module):
    """The convolutions of one sublayer."""

    def __init__(self, hidden_size: int, convolution: Convolution) -> None:
        super().__init__()
        self._taps = convolution.taps
        self._group = convolution.group
        self._groups = hidden_size // convolution.group
        # The first dimension: before the sublayer, after it.
        self.base_kernel = nn.Parameter(torch.empty(2, self._taps, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * self._taps * self._groups, bias=False)

    def kernels(self, hidden: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The kernels before and after the sublayer: [B, N, taps, groups, channels of a group].

        hidden: [n, H], the sublayer's normed input, of whole blocks of `width` positions.
        """
        by_group = 2, self._taps, self._groups
        of_hidden = self.kernel_projection(hidden).view(-1, width, *by_group, 1)
        before, after = (self.base_kernel.view(*by_group, self._group) + of_hidden).unbind(2)
        return before, after

    def convolve(self, hidden: Tensor, kernel: Tensor) -> Tensor:
        """Convolve whole blocks, [n, H], by one of `kernels`."""
        width = kernel.shape[1]
        blocks = hidden.view(-1, width, self._groups, self._group)
        output = kernel[:, :, 0] * blocks
        for tap in range(1, min(self._taps, width)):
            output[:, tap:].addcmul_(kernel[:, tap:, tap], blocks[:, :-tap])
        return output.view(hidden.shape)


class ConvolvedLayer(DFlashLayer):
    """A layer whose sublayers have a convolution before and after them (DFlash 2)."""

    def __init__(
        self, config: DFlashConfig, layer_id: int, rotary_emb: DraftRotary, quant: Quantization
    ) -> None:
        super().__init__(config, layer_id, rotary_emb, quant)
        assert isinstance(config.family, DFlash2)
        assert config.family.convolution is not None
        self.attention_conv = BlockConvolution(config.hidden_size, config.family.convolution)
        self.mlp_conv = BlockConvolution(config.hidden_size, config.family.convolution)

    def _attend(self, positions: Tensor, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        conv = self.attention_conv
        before, after = conv.kernels(hidden, self.block_width)
        attended = super()._attend(positions, conv.convolve(hidden, before), batch)
        return conv.convolve(attended, after)

    def _transform(self, hidden: Tensor) -> Tensor:
        conv = self.mlp_conv
        before, after = conv.kernels(hidden, self.block_width)
        return conv.convolve(super()._transform(conv.convolve(hidden, before)), after)


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


class Selection(DraftHead):
    """Drafts blocks with a candidate selector."""

    def __init__(self, config: DFlashConfig, selector: Selector) -> None:
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config, selector)

    def bind(self, *given: Any) -> None:
        super().bind(*given)
        self.candidate_selector.fit(self.vocabulary)

    def blocks(
        self, hidden: Tensor, token_ids: Tensor, return_probs: bool, noise: DraftNoise
    ) -> Prediction:
        drafting = hidden[:, self.config.first_drafting :]  # [B, S, H]
        ids, logits = self._candidates(drafting)
        before = before_each(ids, token_ids[:, :1])
        scores = logits[:, :, None] + self.candidate_selector.edges(drafting, before, ids)
        return walk(self.vocabulary.kernels, ids, scores, return_probs, noise)

    def _candidates(self, drafting: Tensor) -> Candidates:
        """The candidates of each position, [B, S, k] each.

        The multiplier is positive and the cap is monotone, so they are applied to candidates alone.
        """
        count = self.candidate_selector.top_k
        hidden = drafting.flatten(0, 1)
        found = self.vocabulary.candidates(self.vocabulary.logits(hidden), count)
        shape = *drafting.shape[:2], count
        return Candidates(found.ids.view(shape), self.scaled(found.logits).view(shape))


def head(config: DFlashConfig) -> DraftHead:
    assert isinstance(config.family, DFlash2)
    if config.family.selector is None:
        return dflash.Head(config)
    return Selection(config, config.family.selector)


def layer(config: DFlashConfig) -> type[DFlashLayer]:
    """The class of its layers."""
    assert isinstance(config.family, DFlash2)
    return DFlashLayer if config.family.convolution is None else ConvolvedLayer
