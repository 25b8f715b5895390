"""The block: the anchor, then N - 1 mask tokens (DFlash paper, section "drafting")."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Block(NamedTuple):
    """What the draft reads, all [B, N] int64."""

    token_ids: Tensor  # column 0 is the anchor
    positions: Tensor
    slots: Tensor  # of these positions in the rows of the requests


def masked_block(anchors: Tensor, block_size: int, mask_token_id: int) -> Tensor:
    """Token ids the draft reads. anchors: [B] int64 -> [B, N] int64, column 0 is the anchor."""
    block = anchors.new_full((anchors.shape[0], block_size), mask_token_id)
    block[:, 0] = anchors
    return block


def block_positions(seq_lens: Tensor, at: Tensor) -> Tensor:
    """Absolute positions, [B, N] int64. seq_lens: [B] tokens before the anchor; at: [N] 0..N-1."""
    return seq_lens[:, None] + at


def block_in_torch(
    anchors: Tensor, seq_lens: Tensor, rows: Tensor, table: Tensor, at: Tensor, mask_token_id: int
) -> Block:
    """What `kernels.block.launch_block` does, which has the shapes."""
    positions = block_positions(seq_lens, at)
    slots = table[rows[:, None], positions].long()
    return Block(masked_block(anchors, len(at), mask_token_id), positions, slots)
