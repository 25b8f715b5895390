"""The one acceptance rule, and what a step makes of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def accept(block: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Accept drafts while the target, drawing for itself, draws the same token.

    Drafts are argmax, so the proposal is a point mass: accepting exactly when the target's own draw
    equals the draft, and committing the first draw that differs, leaves the target's distribution
    untouched (Leviathan et al. 2023, theorem 1, with q a point mass). Greedy decoding is the case
    where the draw is argmax.

    block: [B, w] int64, column 0 is the anchor; target_ids: [B, w] int64, the target's draw after
    each block position. Returns num_accepted [B] int64 in 0..w-1 and bonus [B] int64. The committed
    tokens are target_ids[:, :num_accepted + 1].
    """
    matches = block[:, 1:] == target_ids[:, :-1]  # [B, w-1]
    num_accepted = matches.cumprod(dim=1).sum(dim=1)  # [B]
    bonus = target_ids.gather(1, num_accepted[:, None]).squeeze(1)
    return num_accepted, bonus


class Accepted(NamedTuple):
    """What a step commits: for the host, for the next step, and for the next draft."""

    packed: Tensor  # [B, w + 1] int64, the target's draws, then num_accepted
    bonus: Tensor  # [B] int64, the last committed tokens
    lens: Tensor  # [B] int64, lengths of the contexts before these

    @property
    def num_accepted(self) -> Tensor:
        """[B] int64"""
        return self.packed[:, -1]


def accept_in_torch(
    block: Tensor, target_ids: Tensor, seq_lens: Tensor, most: int, given: Tensor | None = None
) -> Accepted:
    """What `kernels.accept.launch_accept` does, which has the shapes."""
    if given is None:
        num_accepted, bonus = accept(block, target_ids)
    else:
        num_accepted, bonus = given, target_ids.gather(1, given[:, None]).squeeze(1)
    lens = (seq_lens + num_accepted + 1).clamp(max=most)
    return Accepted(torch.cat([target_ids, num_accepted[:, None]], dim=1), bonus, lens)
