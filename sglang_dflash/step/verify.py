"""Verify: one causal forward of the target over the block, a sample at every position, accept."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

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

from sglang_dflash.kernels import Kernels
from sglang_dflash.method.acceptance import AcceptResult
from sglang_dflash.method.block import Block
from sglang_dflash.method.simulate import simulated_commit
from sglang_dflash.step.clock import StepClock
from sglang_dflash.step.copies import to_device
from sglang_dflash.step.forward import VerifyInput
from sglang_dflash.step.noise import Noise
from sglang_dflash.step.sample import LogitRules, SamplingInput, TargetSampler

logger = logging.getLogger(__name__)

# A prefill changes recurrent states by these fields. Its batch keeps them and becomes the running
# batch, and SGLang's linear attention would do all of it again in a verify.
PREFILL_ONLY_FIELDS = dict.fromkeys(
    (
        "mamba_clear_indices",
        "mamba_cow_src_indices",
        "mamba_cow_dst_indices",
        "mamba_track_indices",
        "mamba_track_mask",
        "mamba_track_seqlens",
    )
)


@dataclass(frozen=True)
class VerifyResult:
    block: Block
    positions: Tensor  # [T] int64
    accepted: AcceptResult
    result: GenerationBatchResult  # of the target's forward, `output` inside

    @property
    def output(self) -> LogitsProcessorOutput:
        """The target's output at the T rows of the block.

        next_token_logits: [T, V] as the sampler saw them, float32 if logprobs are wanted;
        hidden_states: [T, K * H], the features, then [.., H] of the last layer if requested.
        """
        return self.result.logits_output


class TargetGraphs(Protocol):
    """The target's graphs, for all that a step may verify."""

    def use(self, block: Block) -> None:
        """Verify blocks of this shape from now on."""

    def use_whole(self) -> None:
        """Verify whole blocks from now on."""

    def forward_batch(
        self, block: Block, rows: Tensor, seq_lens: Tensor, seq_lens_cpu: Tensor
    ) -> ForwardBatch:
        """The forward of a block in its graph. rows, seq_lens, seq_lens_cpu: as in `plan`."""

    def capture(self) -> None:
        """Capture anew."""


class Verifier:
    def __init__(
        self,
        target: TpModelWorker,
        sampler: TargetSampler,
        noise: Noise,
        rules: LogitRules,
        graphs: TargetGraphs,
        kernels: Kernels,
        clock: StepClock,
    ) -> None:
        self._target = target
        self._runner = target.model_runner
        self._sampler = sampler
        self._noise = noise
        self._rules = rules
        self._graphs = graphs
        self._kernels = kernels
        self._clock = clock
        self._planned: tuple[Block, ForwardBatch] | None = None
        self._simulated_length = envs.SGLANG_SIMULATE_ACC_LEN.get()  # 0: the drafts decide
        if self._simulated_length > 0:
            length = self._simulated_length
            logger.warning("SIMULATED ACCEPTANCE of %s: output is meaningless.", length)

    def plan(self, rows: Tensor, block: Block, seq_lens: Tensor, seq_lens_cpu: Tensor) -> None:
        """Fill the inputs of this block's verify graph before the host waits.

        rows, seq_lens, seq_lens_cpu: [B] int64; seq_lens_cpu: at least the true lengths. The plan
        is in buffers that all graphs share, so the forward of any other graph destroys it
        (`drop_plan`). The LoRA adapters of these requests are in them since their last verify.
        """
        self._graphs.use(block)
        graphs = self._runner.graph_runner
        if graphs is None or self._runner.model_is_mrope or enable_num_token_non_padded():
            return  # these forwards have further inputs, which only SGLang's own batch has
        forward = self._graphs.forward_batch(block, rows, seq_lens, seq_lens_cpu)
        if not graphs.can_run(forward):
            return
        graphs.replay_prepare(forward)
        forward.mark_forward_metadata_ready()
        self._planned = block, forward

    def drop_plan(self) -> None:
        """Drop the plan, because a prefill or new graphs come between it and its verify."""
        self._planned = None

    def verify(self, batch: ScheduleBatch, block: Block) -> VerifyResult:
        """Run the target over the block, and accept the drafts that equal its own samples."""
        with self._clock("verify"):
            return self._verify(batch, block)

    def _verify(self, batch: ScheduleBatch, block: Block) -> VerifyResult:
        self._graphs.use(block)
        simulated = self._simulated(batch, block) if self._simulated_length > 0 else None
        result = self._forward(batch, block)
        output = result.logits_output
        if batch.return_hidden_states:
            # The graph of the next draft may overwrite those that this graph left.
            output.hidden_states = output.hidden_states.clone()
        asked = SamplingInput.of(batch, block)
        if batch.return_logprob or self._sampler.needs_float32(asked):
            output.next_token_logits = output.next_token_logits.float()
        positions = block.flatten(block.positions)
        sampled = self._sampler(output.next_token_logits, asked, positions)
        sampled = block.unflatten(sampled)
        accepted = self._kernels.accept(
            self._acceptable(asked, block),
            sampled,
            block.slots,
            batch.seq_lens,
            self._target.model_config.context_len,
            simulated,
            block.lens,
        )
        right = accepted.outcome.num_accepted
        self._noise.learn(batch.reqs, batch.req_pool_indices, block, sampled, right)
        return VerifyResult(block, positions, accepted, result)

    def _forward(self, batch: ScheduleBatch, block: Block) -> GenerationBatchResult:
        """The target's forward over the block, by its plan if there is one."""
        is_planned = self._planned is not None and self._planned[0] is block
        if block.ragged is not None and not is_planned:  # SGLang's own batch has equal widths
            self.plan(batch.req_pool_indices, block, batch.seq_lens, batch.seq_lens_cpu)
            assert self._planned is not None or self._runner.graph_runner is None
        planned, self._planned = self._planned, None
        if planned is not None and planned[0] is block:
            return self._target.forward_batch_generation(None, planned[1], is_verify=True)
        view = shallow_view(batch)
        view.forward_mode = ForwardMode.TARGET_VERIFY
        view.spec_info = verify_input = VerifyInput(block)
        view.input_ids = verify_input.draft_token
        view.out_cache_loc = verify_input.out_cache_loc
        view.return_hidden_states = False
        view.replace_embeds = None  # SGLang does not remove those of a prompt
        vars(view).update(PREFILL_ONLY_FIELDS)
        return self._target.forward_batch_generation(view, is_verify=True)

    def idle(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Take part in a forward of other replicas without a request in it (DP attention).

        If they verify, they verify whole blocks.
        """
        view = shallow_view(batch)
        if not batch.is_extend_in_batch:
            width = self._runner.server_args.speculative_num_draft_tokens
            empty = torch.empty(0, width, dtype=torch.int64, device=self._target.device)
            view.spec_info = VerifyInput(Block(empty, empty, empty))
        return self._target.forward_batch_generation(view, is_verify=True)

    def _simulated(self, batch: ScheduleBatch, block: Block) -> Tensor:
        """The number of drafts that SGLANG_SIMULATE_ACC_LEN accepts per request, [B] int64.

        It is copied before the verify is queued, so that the copy waits for nothing.
        """
        accepted = [
            simulated_commit(req.spec_verify_ct, self._simulated_length, block.width) - 1
            for req in batch.reqs
        ]
        return to_device(accepted, block.token_ids.device)

    def _acceptable(self, asked: SamplingInput, block: Block) -> Tensor:
        """The block's tokens, [B, w] int64, -1 for drafts that count as wrong.

        So do all drafts of a request that commits one token per step.
        """
        tokens = block.token_ids
        alone = self._rules.one_token_a_step(asked)
        if any(alone):
            requests = to_device(alone, tokens.device, torch.bool)
            is_draft = torch.arange(block.width, device=tokens.device) > 0
            tokens = tokens.masked_fill(requests[:, None] & is_draft, -1)
        return tokens

    def dry_run(
        self,
        block: Block,
        rows: Tensor,
        seq_lens: Tensor,
        seq_lens_cpu: Tensor,
        lora_ids: list[str | None] | None,
    ) -> LogitsProcessorOutput:
        """Run the target's forward over dummy slots, to time it.

        lora_ids: the adapter of each request. None: the target takes none.
        """
        self._graphs.use(block)
        forward = self._graphs.forward_batch(block, rows, seq_lens, seq_lens_cpu)
        if self._runner.model_is_mrope:
            forward.mrope_positions = forward.positions.expand(3, -1)
        if lora_ids is not None:
            forward.lora_ids = lora_ids
            self._runner.lora_manager.prepare_lora_batch(forward)
        return self._runner.forward(forward).logits_output


def shallow_view(batch: ScheduleBatch) -> ScheduleBatch:
    """A copy of the batch. Setting its fields does not change the scheduler's batch.

    This takes a third of the time of `copy.copy`.
    """
    view = object.__new__(ScheduleBatch)
    vars(view).update(vars(batch))
    return view
