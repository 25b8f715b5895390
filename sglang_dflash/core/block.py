"""The block: the anchor, then N - 1 mask tokens (DFlash paper, section "drafting")."""

from __future__ import annotations

from torch import Tensor


def masked_block(anchors: Tensor, block_size: int, mask_token_id: int) -> Tensor:
    """Token ids the draft reads. anchors: [B] int64 -> [B, N] int64, column 0 is the anchor."""
    block = anchors.new_full((anchors.shape[0], block_size), mask_token_id)
    block[:, 0] = anchors
    return block


def block_positions(seq_lens: Tensor, at: Tensor) -> Tensor:
    """Absolute positions, [B, N] int64. seq_lens: [B] tokens before the anchor; at: [N] 0..N-1."""
    return seq_lens[:, None] + at
