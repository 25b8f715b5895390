"""Verify: one causal forward of the target over the block, a draw at every position, accept."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from sglang_dflash.core.accept import accept
from sglang_dflash.core.simulate import simulated_commit
from sglang_dflash.runtime.draw import TargetDraw
from sglang_dflash.runtime.state import DFlashBlock

logger = logging.getLogger(__name__)


@dataclass
class Verified:
    block: DFlashBlock
    target_ids: Tensor  # [B, N] int64, the target's draw after each block position
    num_accepted: Tensor  # [B] int64
    bonus: Tensor  # [B] int64
    result: GenerationBatchResult  # of the target's forward, `output` inside

    @property
    def output(self) -> LogitsProcessorOutput:
        """next_token_logits: [B * N, V] as the draw saw them; hidden_states: [B * N, K * H], the
        features of the block, then [.., H] of the last layer where requested."""
        return self.result.logits_output


class Verifier:
    def __init__(self, target: TpModelWorker, draw: TargetDraw) -> None:
        self._target, self._draw = target, draw
        self._simulated = envs.SGLANG_SIMULATE_ACC_LEN.get()
        if self._simulated > 0:
            logger.warning("SIMULATED ACCEPTANCE of %s: output is meaningless.", self._simulated)

    def verify(self, batch: ScheduleBatch, block: DFlashBlock) -> Verified:
        view = copy.copy(batch)  # the scheduler's batch keeps its own mode, inputs and state
        view.forward_mode = ForwardMode.TARGET_VERIFY
        view.input_ids = block.draft_token
        view.out_cache_loc = block.slots.flatten()
        view.spec_info = block
        view.return_hidden_states = False
        result = self._target.forward_batch_generation(view, is_verify=True)
        logits = result.logits_output.next_token_logits
        target_ids = self._draw(logits, batch, block.position_ids, block.token_ids)
        num_accepted, bonus = accept(self._proposal(batch, block, target_ids), target_ids)
        return Verified(block, target_ids, num_accepted, bonus, result)

    def _proposal(self, batch: ScheduleBatch, block: DFlashBlock, target_ids: Tensor) -> Tensor:
        """What is held against the target's draw, [B, N]: the block, except in two cases.

        Custom logit processors are user code that reads the request: they run on the anchor's row
        alone, so such a request's drafts count as wrong and it commits one token a step.
        SGLANG_SIMULATE_ACC_LEN makes as many drafts right as its sequence says.
        """
        if self._simulated > 0:
            commits = [
                simulated_commit(req.spec_verify_ct, self._simulated, block.draft_token_num)
                for req in batch.reqs
            ]
            right = torch.arange(block.draft_token_num) < torch.tensor(commits)[:, None]
            return torch.where(right.to(target_ids.device), target_ids.roll(1, dims=1), -1)
        info = batch.sampling_info
        if info.has_custom_logit_processor:
            custom = torch.stack([mask for _, mask in info.custom_logit_processor.values()])
            drafts = torch.arange(block.draft_token_num, device=custom.device) > 0
            return block.token_ids.masked_fill(custom.any(dim=0)[:, None] & drafts, -1)
        return block.token_ids
