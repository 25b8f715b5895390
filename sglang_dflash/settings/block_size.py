"""The longest block that a server verifies."""

from __future__ import annotations

from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.seam import release


def longest_block(draft: DFlashConfig) -> int:
    """Positions of a whole block. SGLang's own worker verifies as many as the draft reads."""
    return draft.block_size if release.has_own_scheduler_step() else draft.draft_width
