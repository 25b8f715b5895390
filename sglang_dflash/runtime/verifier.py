"""Verify: one causal forward of the target over the block, a draw at every position, accept."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import (
    ForwardBatch,
    ForwardMode,
    enable_num_token_non_padded,
)
from torch import Tensor

from sglang_dflash.core.accept import Accepted
from sglang_dflash.core.simulate import simulated_commit
from sglang_dflash.kernels.accept import accept_block
from sglang_dflash.runtime.draw import TargetDraw
from sglang_dflash.runtime.state import DFlashBlock
from sglang_dflash.runtime.width import Widths

logger = logging.getLogger(__name__)


@dataclass
class Verified:
    block: DFlashBlock
    accepted: Accepted
    result: GenerationBatchResult  # of the target's forward, `output` inside

    @property
    def output(self) -> LogitsProcessorOutput:
        """next_token_logits: [rows, V] as the draw saw them, float32 where more than their argmax
        is asked for; hidden_states: [rows, K * H], the features of the block, then [.., H] of the
        last layer where requested."""
        return self.result.logits_output


class Verifier:
    def __init__(self, target: TpModelWorker, draw: TargetDraw, widths: Widths) -> None:
        self._target, self._draw, self._widths = target, draw, widths
        self._runner = target.model_runner
        self._planned: tuple[DFlashBlock, ForwardBatch] | None = None
        self._simulated = envs.SGLANG_SIMULATE_ACC_LEN.get()
        if self._simulated > 0:
            logger.warning("SIMULATED ACCEPTANCE of %s: output is meaningless.", self._simulated)

    def plan(
        self, rows: Tensor, block: DFlashBlock, seq_lens: Tensor, seq_lens_cpu: Tensor
    ) -> None:
        """Fill what the graph of this block's verify reads, while the host has nothing to wait for.

        All [B] int64; seq_lens_cpu: at least the true lengths. The plan lies in buffers that every
        graph shares, so any other forward of a graph undoes it: see `forget`.
        """
        graphs = self._runner.graph_runner
        if graphs is None or self._runner.model_is_mrope or enable_num_token_non_padded():
            return  # what these forwards carry besides, only SGLang's own batch has
        forward = block.forward_batch(rows, seq_lens, seq_lens_cpu)
        if not graphs.can_run(forward):
            return
        graphs.replay_prepare(forward)
        forward.mark_forward_metadata_ready()
        self._planned = block, forward

    def forget(self) -> None:
        """A prefill, or new graphs, have come between a plan and its verify."""
        self._planned = None

    def verify(self, batch: ScheduleBatch, block: DFlashBlock) -> Verified:
        self._widths.use(block.draft_token_num)
        simulated = self._simulate(batch, block) if self._simulated > 0 else None
        result = self._forward(batch, block)
        output = result.logits_output
        if batch.return_logprob or not self._draw.is_argmax(batch):
            output.next_token_logits = output.next_token_logits.float()
        drawn = self._draw(output.next_token_logits, batch, block.positions, block)
        target_ids = block.padded(drawn)
        tokens, most = self._acceptable(batch, block), self._target.model_config.context_len
        accepted = accept_block(tokens, target_ids, batch.seq_lens, most, simulated)
        return Verified(block, accepted, result)

    def _forward(self, batch: ScheduleBatch, block: DFlashBlock) -> GenerationBatchResult:
        """The target's forward over the block, planned already or not."""
        planned, self._planned = self._planned, None
        if planned is not None and planned[0] is block:
            return self._target.forward_batch_generation(None, planned[1], is_verify=True)
        view = object.__new__(ScheduleBatch)  # the scheduler's keeps its mode, inputs and state
        vars(view).update(vars(batch))  # a third of what `copy.copy` takes
        view.forward_mode = ForwardMode.TARGET_VERIFY
        view.input_ids, view.out_cache_loc = block.draft_token, block.out_cache_loc
        view.spec_info = block
        view.return_hidden_states = False
        view.replace_embeds = None  # SGLang leaves a prompt's behind
        return self._target.forward_batch_generation(view, is_verify=True)

    def _simulate(self, batch: ScheduleBatch, block: DFlashBlock) -> Tensor:
        """How many drafts SGLANG_SIMULATE_ACC_LEN accepts of each request, [B] int64.

        Copied before the verify is queued, so that the copy waits for nothing.
        """
        each = zip(batch.reqs, block.lens, strict=True)
        right = [
            simulated_commit(req.spec_verify_ct, self._simulated, most) - 1 for req, most in each
        ]
        device = block.token_ids.device
        on_host = torch.tensor(right, pin_memory=device.type == "cuda")
        return on_host.to(device, non_blocking=True)

    def _acceptable(self, batch: ScheduleBatch, block: DFlashBlock) -> Tensor:
        """The block's tokens, [B, w] int64, -1 where a draft counts as wrong.

        Custom logit processors are user code that reads the request: they run on the anchor's row
        alone, so such a request's drafts count as wrong and it commits one token a step.
        """
        width, info = block.draft_token_num, batch.sampling_info
        tokens = block.token_ids
        if block.real is not None:
            tokens = tokens.masked_fill(~block.real, -1)
        if info.has_custom_logit_processor:
            custom = torch.stack([mask for _, mask in info.custom_logit_processor.values()])
            drafts = torch.arange(width, device=custom.device) > 0
            tokens = tokens.masked_fill(custom.any(dim=0)[:, None] & drafts, -1)
        return tokens
