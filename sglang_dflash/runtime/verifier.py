"""Verify: one causal forward of the target over the block, a draw at every position, accept."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from torch import Tensor

from sglang_dflash.core.accept import accept
from sglang_dflash.runtime.state import DFlashBlock


@dataclass
class Verified:
    block: DFlashBlock
    target_ids: Tensor  # [B, N] int64, the target's draw after each block position
    num_accepted: Tensor  # [B] int64
    bonus: Tensor  # [B] int64
    features: Tensor  # [B * N, K * H], the target's hidden states of the block
    logits_output: LogitsProcessorOutput
    can_run_cuda_graph: bool


class Verifier:
    def __init__(self, target: TpModelWorker) -> None:
        self._target = target
        self._group = get_tp_group()

    def verify(self, batch: ScheduleBatch, block: DFlashBlock) -> Verified:
        view = copy.copy(batch)  # the scheduler's batch keeps its own mode, inputs and state
        view.forward_mode = ForwardMode.TARGET_VERIFY
        view.input_ids = block.draft_token
        view.out_cache_loc = block.slots.flatten()
        view.spec_info = block
        view.return_hidden_states = False
        result = self._target.forward_batch_generation(view, is_verify=True)
        output = result.logits_output
        target_ids = self._draw(output, batch.sampling_info, block)
        num_accepted, bonus = accept(block.token_ids, target_ids)
        return Verified(
            block=block,
            target_ids=target_ids,
            num_accepted=num_accepted,
            bonus=bonus,
            features=output.hidden_states,
            logits_output=output,
            can_run_cuda_graph=result.can_run_cuda_graph,
        )

    def _draw(
        self, output: LogitsProcessorOutput, info: SamplingBatchInfo, block: DFlashBlock
    ) -> Tensor:
        """The target's own token after every block position, [B, N] int64, equal on all ranks."""
        if info.is_all_greedy:
            ids = output.next_token_logits.argmax(dim=-1)
        else:
            width = block.draft_token_num
            sampler = self._target.model_runner.sampler
            ids = sampler(output, _repeat(info, width), False, [], [], block.positions)
        ids = ids.long()
        if self._group.world_size > 1:
            # Ranks hold the same logits up to rounding; a near-tie must not part them.
            torch.distributed.broadcast(ids, src=self._group.ranks[0], group=self._group.device_group)
        return ids.view_as(block.token_ids)


def _repeat(info: SamplingBatchInfo, width: int) -> SamplingBatchInfo:
    """Each request's parameters for all rows of its block."""

    def rows(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.repeat_interleave(width, dim=0)

    return replace(
        info,
        temperatures=rows(info.temperatures),
        top_ps=rows(info.top_ps),
        top_ks=rows(info.top_ks),
        min_ps=rows(info.min_ps),
        sampling_seed=rows(info.sampling_seed),
        penalizer_orchestrator=None,
        logit_bias=None,
        grammars=None,
    )
