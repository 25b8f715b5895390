"""The block: the anchor, then N - 1 mask tokens (DFlash paper, section "drafting")."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def masked_block(anchors: Tensor, block_size: int, mask_token_id: int) -> Tensor:
    """Token ids the draft reads. anchors: [B] int64 -> [B, N] int64, column 0 is the anchor."""
    return pad(anchors[:, None], (0, block_size - 1), value=mask_token_id)


def block_positions(seq_lens: Tensor, block_size: int) -> Tensor:
    """Absolute positions of the block. seq_lens: [B] tokens before the anchor -> [B, N] int64."""
    return seq_lens[:, None] + torch.arange(block_size, device=seq_lens.device)
