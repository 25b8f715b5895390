"""Propose: one forward of the draft over anchor and masks."""

from __future__ import annotations

import torch
from sglang.srt.distributed.parallel_state import get_attn_tp_group
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.speculative.spec_utils import draft_tp_context
from torch import Tensor

from sglang_dflash.kernels import Kernels
from sglang_dflash.kernels.next_block import block_positions
from sglang_dflash.method.block import Block
from sglang_dflash.model.lm_head import Prediction
from sglang_dflash.step.clock import StepClock
from sglang_dflash.step.forward import VerifyInput
from sglang_dflash.step.window import DraftWindow


class Drafter:
    """Runs the draft over the blocks of a batch."""

    def __init__(
        self,
        runner: ModelRunner,
        table: Tensor,
        window: DraftWindow | None,
        block_size: int,
        kernels: Kernels,
        clock: StepClock,
    ) -> None:
        """table: [R, C] int32, `req_to_token` of target and draft; block_size: positions N."""
        self._runner = runner
        self._table = table
        self._window = window
        self._block_size = block_size
        self._kernels = kernels
        self._clock = clock
        draft = runner.model.dflash
        self._mask_token_id = draft.mask_token_id
        self._draft_width = draft.width_of(block_size)

    def propose(
        self, batch: ScheduleBatch, anchors: Tensor, seq_lens: Tensor, seq_lens_cpu: Tensor
    ) -> Block:
        """Draft the next block of every request.

        anchors: [B] int64, the last committed tokens; seq_lens: [B] int64, tokens before them;
        seq_lens_cpu: [B] int64 on the host, at least `seq_lens`, and exactly `seq_lens` for
        FlashInfer. Afterwards the block's slots hold the K/V of the draft's masks.
        """
        with self._clock("draft"):
            return self._propose(batch, anchors, seq_lens, seq_lens_cpu)

    def _propose(
        self, batch: ScheduleBatch, anchors: Tensor, seq_lens: Tensor, seq_lens_cpu: Tensor
    ) -> Block:
        rows = batch.req_pool_indices
        token_ids, positions, slots = self._kernels.next_block(
            anchors, seq_lens, rows, self._table, self._block_size, self._mask_token_id
        )
        drafts = self._forward(
            Block(
                token_ids[:, : self._draft_width],
                positions[:, : self._draft_width],
                slots[:, : self._draft_width],
            ),
            rows,
            seq_lens,
            seq_lens_cpu,
        )
        # This copies the drafts: the graphs of draft and target share memory.
        before = anchors.expand(drafts.shape[2], -1)[:, :, None]
        columns = torch.cat([before, drafts.permute(2, 0, 1)], dim=2)  # [.., B, N]
        with_probs = self._runner.model.return_probs
        token_ids, picks, probabilities = Prediction.unpack(columns, with_probs)
        if probabilities is not None:
            probabilities = probabilities[:, 1:]
        return Block(token_ids, positions, slots, probabilities, picks)

    def _forward(
        self, masked: Block, rows: Tensor, seq_lens: Tensor, seq_lens_cpu: Tensor
    ) -> Tensor:
        """Run the draft. Returns drafts as `Prediction.pack` does: [B, N-1, ..] int64."""
        if self._window is not None:
            seq_lens, seq_lens_cpu = self._window.lens(rows, seq_lens, seq_lens_cpu)
        verify_input = VerifyInput(masked, CaptureHiddenMode.NULL)
        forward = verify_input.forward_batch(rows, seq_lens, seq_lens_cpu)
        packed: Tensor = self._run(forward).hidden_states
        requests = len(rows)
        drafts = self._block_size - 1
        return packed[: requests * drafts].view(requests, drafts, *packed.shape[1:])

    def _run(self, forward: ForwardBatch) -> LogitsProcessorOutput:
        """Run it on the ranks that have these requests. With DP attention, others have others."""
        with draft_tp_context(get_attn_tp_group()):
            return self._runner.forward(forward).logits_output

    def dry_run(self, rows: Tensor, seq_lens: Tensor, seq_lens_cpu: Tensor) -> None:
        """Run the draft's forward on dummy slots, to time it."""
        dummy = rows.new_zeros(len(rows), self._draft_width)
        positions = block_positions(seq_lens, self._draft_width)
        masked = Block(dummy, positions, dummy)
        verify_input = VerifyInput(masked, CaptureHiddenMode.NULL)
        forward = verify_input.forward_batch(rows, seq_lens, seq_lens_cpu)
        self._run(forward)
