"""Frequency, presence and repetition penalties at every block position (pure torch).

At block position j one-token decoding would have seen the output so far plus block tokens 0..j: the
anchor and the drafts up to j. Only the columns of the block's own tokens differ from what the
output so far gives, so each row is penalised once by the output so far, and those few columns are
computed anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Penalties:
    """State of a batch, over the output before the anchor. Tensors are updated in place.

    SGLang's own tensors (`penaltylib`), so that its filter and merge keep them with their requests;
    None where no request of the batch uses the penalty.
    """

    frequency: Tensor | None = None  # [B, V] summed penalty
    frequency_step: Tensor | None = None  # [B, 1]
    presence: Tensor | None = None  # [B, V] 0 or the penalty
    presence_step: Tensor | None = None  # [B, 1]
    repetition: Tensor | None = None  # [B, V] 1 or the penalty
    repetition_step: Tensor | None = None  # [B, 1]
    length: Tensor | None = None  # [B, 1] int32, tokens of output
    min_length: Tensor | None = None  # [B, 1] int32
    stop_bias: Tensor | None = None  # [B, V] 0, -inf at stop tokens

    def apply(self, logits: Tensor, block: Tensor | None) -> None:
        """Penalise in place. logits: [B, w, V]; block: [B, w] int64, None in prefill (w = 1).

        Additive penalties come first, then scaling, as in SGLang's overlap mode.
        """
        if block is None:
            self._scale_and_add(logits, self.frequency, self.presence, self.repetition)
        else:
            self._apply_block(logits, block)
        if self.length is not None:
            seen = torch.arange(logits.shape[1], device=logits.device) + (block is not None)
            early = self.length + seen < self.min_length  # [B, w]
            logits.add_(torch.where(early[:, :, None], self.stop_bias[:, None], 0.0))

    def _apply_block(self, logits: Tensor, block: Tensor) -> None:
        columns = block[:, None, :].expand(-1, block.shape[1], -1)  # [B, w, w]: row j, token k
        own = logits.gather(2, columns)
        same = block[:, :, None] == block[:, None, :]
        counts = same.long().cumsum(dim=1)  # [B, w, w] occurrences of token k in block[0..j]

        def at_block(base: Tensor | None, stepped: object) -> Tensor | None:
            """The state's value at each block token, with the block's own occurrences."""
            if base is None:
                return None
            value = base.gather(1, block)[:, None, :].expand_as(own)
            return stepped(value)

        frequency = at_block(
            self.frequency, lambda value: value + counts * self.frequency_step[:, :, None]
        )
        presence = at_block(
            self.presence,
            lambda value: torch.where(counts > 0, self.presence_step[:, :, None], value),
        )
        repetition = at_block(
            self.repetition,
            lambda value: torch.where(counts > 0, self.repetition_step[:, :, None], value),
        )
        self._scale_and_add(logits, self.frequency, self.presence, self.repetition)
        self._scale_and_add(own, frequency, presence, repetition)
        logits.scatter_(2, columns, own)

    @staticmethod
    def _scale_and_add(
        logits: Tensor,
        frequency: Tensor | None,
        presence: Tensor | None,
        repetition: Tensor | None,
    ) -> None:
        for penalty in (frequency, presence):
            if penalty is not None:
                logits.sub_(penalty[:, None] if penalty.dim() == 2 else penalty)
        if repetition is not None:
            scale = repetition[:, None] if repetition.dim() == 2 else repetition
            logits.copy_(torch.where(logits < 0, logits * scale, logits / scale))

    def advance(self, tokens: Tensor, count: Tensor) -> None:
        """Add the first `count` of these tokens to the output so far.

        tokens: [B, w] int64; count: [B] int64, at least 1.
        """
        kept = torch.arange(tokens.shape[1], device=tokens.device) < count[:, None]
        tokens = torch.where(kept, tokens, tokens[:, :1])
        if self.frequency is not None:
            self.frequency.scatter_add_(1, tokens, kept * self.frequency_step)
        if self.presence is not None:
            self.presence.scatter_(1, tokens, self.presence_step.expand_as(tokens))
        if self.repetition is not None:
            self.repetition.scatter_(1, tokens, self.repetition_step.expand_as(tokens))
        if self.length is not None:
            self.length += count[:, None].to(self.length.dtype)
