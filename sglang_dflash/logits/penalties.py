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

ROWS_AT_ONCE = 128  # of logits


@dataclass(frozen=True)
class Penalties:
    """The penalties of a batch. A kind that no request uses is None."""

    counts: Tensor  # [B, V] int32, occurrences in the output before the anchor
    frequency: Tensor | None = None  # [B, 1] float32, subtracted for each occurrence
    presence: Tensor | None = None  # [B, 1] float32, subtracted if there is one
    repetition: Tensor | None = None  # [B, 1] float32, a factor if there is one

    def apply(self, logits: Tensor, block: Tensor | None) -> None:
        """Penalise in place. logits: [B, w, V]; block: [B, w] int64, None in prefill (w = 1).

        Additive penalties come first, then scaling, as in SGLang's overlap mode.
        """
        if block is None:
            self._penalise(logits, self.counts[:, None])
            return
        columns = block[:, None, :].expand(-1, block.shape[1], -1)  # [B, w, w]: row j, token k
        own = logits.gather(2, columns)
        self._penalise(logits, self.counts[:, None])
        # Occurrences of block token k up to row j, block[0..j] among them.
        in_block = (block[:, :, None] == block[:, None, :]).long().cumsum(dim=1)
        self._penalise(own, self.counts.gather(1, block)[:, None] + in_block)
        logits.scatter_(2, columns, own)

    def _penalise(self, logits: Tensor, counts: Tensor) -> None:
        """Subtract, then scale, in place. counts: of the columns of logits, broadcast over rows."""
        if self.frequency is not None:
            logits.sub_(self.frequency[:, None] * counts)
        if self.presence is not None:
            logits.sub_(self.presence[:, None] * (counts > 0))
        if self.repetition is not None:
            factor = torch.where(counts > 0, self.repetition[:, None], 1.0)
            some = max(1, ROWS_AT_ONCE // logits.shape[1])  # a whole batch would fill the memory
            for own, by in zip(logits.split(some), factor.split(some), strict=True):
                own.copy_(torch.where(own < 0, own * by, own / by))


@dataclass(frozen=True)
class Bans:
    """Tokens that requests must not take at their first positions, such as early stop tokens."""

    requests: Tensor  # [P] int64
    tokens: Tensor  # [P] int64
    positions: Tensor  # [P] int64, how many positions, from the first one on

    def apply(self, logits: Tensor) -> None:
        """Ban in place. logits: [B, w, V]."""
        columns = logits[self.requests, :, self.tokens]  # [P, w]
        banned = torch.arange(logits.shape[1], device=logits.device) < self.positions[:, None]
        columns.masked_fill_(banned, float("-inf"))
        logits[self.requests, :, self.tokens] = columns
