"""Frequency, presence and repetition penalties at every block position (pure torch).

At block position j, one-token decoding has seen the output so far plus block tokens 0..j: the
anchor and the drafts up to j. The penalties differ from those of the output so far only in the
columns of the block's own tokens. So each position is penalised once by the output so far, and
those few columns are computed again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Penalty:
    """One kind of penalty over the output before the anchor."""

    state: Tensor  # [B, V] the penalty of each token now
    step: Tensor  # [B, 1] added or set by an occurrence


@dataclass
class MinLength:
    """Stop tokens banned until the output is long enough."""

    length: Tensor  # [B, 1] int32, tokens of output before the anchor
    minimum: Tensor  # [B, 1] int32
    stop_bias: Tensor  # [B, V] 0, -inf at stop tokens


@dataclass
class Penalties:
    """The penalties of a batch. A kind that no request uses is None.

    The tensors are SGLang's own (`penaltylib`), so its filter and merge keep them with their
    requests. They are updated in place.
    """

    frequency: Penalty | None = None  # added up
    presence: Penalty | None = None  # set at the first occurrence
    repetition: Penalty | None = None  # a factor, set at the first occurrence
    min_length: MinLength | None = None

    def apply(self, logits: Tensor, block: Tensor | None) -> None:
        """Penalise in place. logits: [B, w, V]; block: [B, w] int64, None in prefill (w = 1).

        Additive penalties come first, then scaling, as in SGLang's overlap mode.
        """
        base = [None if p is None else p.state[:, None] for p in self._kinds()]
        if block is None:
            _penalise(logits, *base)
        else:
            columns = block[:, None, :].expand(-1, block.shape[1], -1)  # [B, w, w]: row j, token k
            own = logits.gather(2, columns)
            _penalise(logits, *base)
            _penalise(own, *self._at_block(block))
            logits.scatter_(2, columns, own)
        if self.min_length is not None:
            seen = torch.arange(logits.shape[1], device=logits.device) + (block is not None)
            early = self.min_length.length + seen < self.min_length.minimum  # [B, w]
            bias = torch.where(early[:, :, None], self.min_length.stop_bias[:, None], 0.0)
            logits.add_(bias)

    def _kinds(self) -> tuple[Penalty | None, Penalty | None, Penalty | None]:
        return self.frequency, self.presence, self.repetition

    def _at_block(self, block: Tensor) -> list[Tensor | None]:
        """Each penalty of block token k at row j, counting it in block[0..j] too: [B, w, w]."""
        same = block[:, :, None] == block[:, None, :]
        counts = same.long().cumsum(dim=1)
        found: list[Tensor | None] = []
        for kind in self._kinds():
            if kind is None:
                found.append(None)
                continue
            before = kind.state.gather(1, block)[:, None, :]
            step = kind.step[:, :, None]
            added = before + counts * step
            found.append(added if kind is self.frequency else torch.where(counts > 0, step, before))
        return found

    def advance(self, tokens: Tensor, count: Tensor) -> None:
        """Add the first `count` of these tokens to the output so far.

        tokens: [B, w] int64; count: [B] int64.
        """
        kept = torch.arange(tokens.shape[1], device=tokens.device) < count[:, None]
        tokens = torch.where(kept, tokens, tokens[:, :1])
        if self.frequency is not None:
            self.frequency.state.scatter_add_(1, tokens, kept * self.frequency.step)
        for kind in (self.presence, self.repetition):
            if kind is not None:
                was = kind.state.gather(1, tokens)
                kind.state.scatter_(1, tokens, torch.where(count[:, None] > 0, kind.step, was))
        if self.min_length is not None:
            self.min_length.length += count[:, None].to(self.min_length.length.dtype)


def _penalise(
    logits: Tensor, frequency: Tensor | None, presence: Tensor | None, repetition: Tensor | None
) -> None:
    """Subtract, then scale, in place; penalties broadcast over logits."""
    for penalty in (frequency, presence):
        if penalty is not None:
            logits.sub_(penalty)
    if repetition is not None:
        logits.copy_(torch.where(logits < 0, logits * repetition, logits / repetition))
