"""Propose: one non-causal forward of the draft over anchor and masks."""

from __future__ import annotations

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_dflash.core.block import block_positions, masked_block
from sglang_dflash.model.vocabulary import CERTAIN
from sglang_dflash.runtime.slots import Slots
from sglang_dflash.runtime.state import DFlashBlock, DFlashState
from sglang_dflash.runtime.window import DraftWindow


class Drafter:
    def __init__(
        self, runner: ModelRunner, slots: Slots, window: DraftWindow | None, verify_width: int
    ) -> None:
        self._runner, self._slots, self._window = runner, slots, window
        self._verify_width, self._draft_width = verify_width, runner.model.draft_width
        self._mask_token_id = runner.model.dflash.mask_token_id

    def propose(self, batch: ScheduleBatch, state: DFlashState) -> DFlashBlock:
        """The drafted block of every request; its slots hold the draft's K/V of the masks."""
        positions = block_positions(batch.seq_lens, self._verify_width)
        slots = self._slots.of(batch, positions)
        masked = DFlashBlock(
            token_ids=masked_block(state.anchors, self._draft_width, self._mask_token_id),
            position_ids=positions[:, : self._draft_width],
            slots=slots[:, : self._draft_width],
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        lens = self._window.lens(batch) if self._window else (batch.seq_lens, batch.seq_lens_cpu)
        forward_batch = masked.forward_batch(batch.req_pool_indices, *lens)
        output = self._runner.forward(forward_batch).logits_output
        predicted = output.hidden_states.unflatten(0, (-1, self._draft_width))
        probability = None
        if self._runner.model.weigh:
            drafts = predicted[:, self._draft_width - self._verify_width + 1 :, 1]
            predicted, probability = predicted[:, :, 0], drafts / CERTAIN
        # Both are copies: the graphs of draft and target share memory, and the target runs next.
        if self._draft_width < self._verify_width:
            token_ids = torch.cat([state.anchors[:, None], predicted], dim=1)
        else:
            token_ids = predicted.clone()
        return DFlashBlock(token_ids, positions, slots, probability)
