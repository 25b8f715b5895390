"""The acceptance rule, and the result of a step."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


def accept(block: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Accept drafts as long as the target's own sample is the same token.

    A draft is accepted exactly if the target's own sample equals it, and the first sample that
    differs is committed. So all that is committed are the target's own samples, and the draft
    changes nothing of them: the target's distribution is unchanged, however the draft was chosen
    before the sample. Greedy decoding is the case in which the sample is the argmax.

    block: [B, w] int64, column 0 is the anchor; target_ids: [B, w] int64, the target's sample after
    each block position. Returns num_accepted [B] int64 in 0..w-1 and bonus [B] int64. The committed
    tokens are target_ids[:, :num_accepted + 1].
    """
    matches = block[:, 1:] == target_ids[:, :-1]  # [B, w-1]
    num_accepted = matches.cumprod(dim=1).sum(dim=1)  # [B]
    bonus = target_ids.gather(1, num_accepted[:, None]).squeeze(1)
    return num_accepted, bonus


class Outcome(NamedTuple):
    """The target's answer to a block."""

    sampled: Tensor  # [B, w] int64, the target's sample after each block position
    num_accepted: Tensor  # [B] int64 in 0..widths-1
    widths: Tensor  # [B] int64 in 1..w, the positions of each request that were verified

    @classmethod
    def unpack(cls, packed: Tensor) -> Outcome:
        """Views of `AcceptResult.packed`, on the device or on the host."""
        return cls(packed[:, :-2], packed[:, -2], packed[:, -1])


class AcceptResult(NamedTuple):
    """The result of a step, on the device."""

    packed: Tensor  # [B, w + 2] int64, an `Outcome` in one tensor, for one copy to the host
    bonus: Tensor  # [B] int64, the last committed token and next anchor
    lens: Tensor  # [B] int64, tokens before the bonus
    kv_slots: Tensor  # [B, w] int64, slots of the anchor and the accepted drafts, then 0

    @property
    def outcome(self) -> Outcome:
        return Outcome.unpack(self.packed)
