"""Propose: one non-causal forward of the draft over anchor and masks."""

from __future__ import annotations

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.model_runner import ModelRunner
from torch import Tensor
from torch.nn.functional import pad

from sglang_dflash.kernels.block import next_block
from sglang_dflash.model.vocabulary import CERTAIN
from sglang_dflash.runtime.slots import Slots
from sglang_dflash.runtime.state import DFlashBlock
from sglang_dflash.runtime.width import BestWidths
from sglang_dflash.runtime.window import DraftWindow


class Drafter:
    def __init__(
        self, runner: ModelRunner, slots: Slots, window: DraftWindow | None, best: BestWidths | None
    ) -> None:
        self._runner, self._slots, self._window, self._best_widths = runner, slots, window, best
        self._mask_token_id = runner.model.dflash.mask_token_id
        # Where the anchor's position predicts a draft, the draft reads one position fewer.
        self._width = runner.server_args.speculative_num_draft_tokens
        self._block_size = self._width + runner.model.dflash.sample_from_anchor
        self._at = torch.arange(self._block_size, device=runner.device)

    def propose(
        self, batch: ScheduleBatch, anchors: Tensor, seq_lens: Tensor, seq_lens_cpu: Tensor
    ) -> DFlashBlock:
        """The drafted block of every request; its slots hold the draft's K/V of the masks.

        anchors: [B] int64, the last committed tokens; seq_lens: [B] int64, tokens before them;
        seq_lens_cpu: on the host and at least these, exactly these with FlashInfer. What is not
        worth its draft has a probability of 0.
        """
        rows, lens = batch.req_pool_indices, (seq_lens, seq_lens_cpu)
        context = anchors, seq_lens, rows, self._slots.table
        block = DFlashBlock(*next_block(*context, self._at, self._mask_token_id))
        masked = block.first(self._width)
        if self._best_widths is not None:
            masked = self._best_widths.to_draft(masked, rows)
        masked.capture_hidden_mode = CaptureHiddenMode.NULL
        if self._window is not None:
            lens = self._window.lens(rows, *lens)
        output = self._runner.forward(masked.forward_batch(rows, *lens)).logits_output
        drafts = masked.padded(output.hidden_states)[:, self._width - self._block_size + 1 :]
        if self._runner.model.weigh:
            drafts, weights = drafts.unbind(2)
            probability = (weights / CERTAIN).clamp(0, 1)  # NaN is no int64
            block.probability = pad(probability, (0, self._block_size - 1 - drafts.shape[1]))
        # Copies: the graphs of draft and target share memory. The block's flat ids are a view.
        block.token_ids[:, 1 : 1 + drafts.shape[1]] = drafts
        block.capture_hidden_mode = CaptureHiddenMode.FULL
        return block
