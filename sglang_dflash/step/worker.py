"""`DFlashWorker`: SGLang's spec-v1 scheduler drives it in place of a TP worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.managers.tp_worker import TpModelWorker

from sglang_dflash.method.acceptance import Outcome
from sglang_dflash.method.block import Block
from sglang_dflash.model.context_kv import ContextKV
from sglang_dflash.step.commit import Committer
from sglang_dflash.step.copies import HostCopy
from sglang_dflash.step.policies import (
    Choice,
    ContextObserver,
    Drafted,
    NextDraft,
    VerifyWidth,
    WorkerReport,
)
from sglang_dflash.step.prefill import Prefill
from sglang_dflash.step.propose import Drafter
from sglang_dflash.step.slots import Slots
from sglang_dflash.step.state import DFlashState
from sglang_dflash.step.verify import TargetGraphs, Verifier, VerifyResult

NEW_WEIGHTS = "The target has the new weights, the draft keeps its own."


@dataclass(frozen=True)
class StepInFlight:
    """A step that is queued on the device."""

    block: Block  # anchors and drafts
    choice: Choice  # the part of it that is verified
    verified: VerifyResult
    copy: HostCopy  # of `verified.accepted.packed`
    following: Drafted | None  # the next block, if it is drafted ahead


class DFlashWorker:
    """Owns the draft; shares the target's rows and allocator. `build` makes its parts."""

    def __init__(
        self,
        target_worker: TpModelWorker,
        draft_worker: TpModelWorker,
        *,
        slots: Slots,
        drafter: Drafter,
        context_kv: ContextKV,
        context_observers: Sequence[ContextObserver],
        prefill: Prefill,
        verifier: Verifier,
        verify_width: VerifyWidth,
        next_draft: NextDraft,
        committer: Committer,
        graphs: TargetGraphs,
        report: WorkerReport,
    ) -> None:
        self.target_worker = target_worker
        self.draft_worker = draft_worker
        self.slots = slots
        self.drafter = drafter
        self.context_kv = context_kv
        self.context_observers = context_observers
        self.prefill = prefill
        self.verifier = verifier
        self.verify_width = verify_width
        self.next_draft = next_draft
        self.committer = committer
        self.graphs = graphs
        self.report = report
        # SGLang reads these of any worker.
        self.model_runner = target_worker.model_runner
        self.model_config = target_worker.model_config
        self.device = target_worker.device
        self.update_weights_from_tensor = target_worker.update_weights_from_tensor
        self.draft_model_runner = draft_worker.model_runner

    @torch.no_grad()
    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Run one prefill or one decode step.

        Inference mode is not used. SGLang's buffers outlive a call and are also written outside of
        it, and its prefill graphs were compiled without inference mode.
        """
        if batch.forward_mode.is_idle():
            self._leave_verify()
            return self.verifier.idle(batch)
        return self._extend(batch) if batch.forward_mode.is_extend() else self._decode(batch)

    def _decode(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Run one step: propose, verify, commit."""
        return self.land(batch, self.launch(batch))

    def launch(self, batch: ScheduleBatch) -> StepInFlight:
        """Queue a step on the device, up to the copy of its outcome and the draft after it."""
        state: DFlashState = batch.spec_info
        self.slots.reserve(batch.reqs)
        lens = batch.seq_lens, batch.seq_lens_cpu
        drafted = state.drafted or Drafted(self.drafter.propose(batch, state.anchors, *lens))
        block = drafted.block
        choice = drafted.planned or self.verify_width.choose(block, batch.reqs)
        verified = self.verifier.verify(batch, choice.block)
        copy = HostCopy(verified.accepted.packed)
        self._write_context(verified, batch)
        following = self.next_draft.after_verify(batch, verified, copy)
        return StepInFlight(block, choice, verified, copy, following)

    def land(self, batch: ScheduleBatch, step: StepInFlight) -> GenerationBatchResult:
        """Wait for the outcome of a step, and give its tokens to their requests."""
        outcome = Outcome.unpack(step.copy.wait())
        batch.spec_info = DFlashState(step.verified.accepted.bonus, step.following)
        step.choice.learn(step.verified.accepted.outcome)
        return self.committer.commit(batch, step.block, step.verified, outcome)

    def _write_context(self, verified: VerifyResult, batch: ScheduleBatch) -> None:
        """Write the context KV of the committed positions: the anchor and the accepted drafts."""
        block, accepted = verified.block, verified.accepted
        slots = block.flatten(accepted.kv_slots)
        states, positions = verified.output.hidden_states, verified.positions
        self.context_kv.write(states, positions, slots)
        if self.context_kv.keeps_last:
            last = block.starts + accepted.outcome.num_accepted
            self.context_kv.keep_last(states, last, batch.req_pool_indices)
        for observer in self.context_observers:
            counts = accepted.outcome.num_accepted + 1
            observer.observe(batch.reqs, states, positions, block.starts, counts)

    def _extend(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Run one prefill. The host waits only for the first tokens, while the draft still runs."""
        self._leave_verify()
        prefilled = self.prefill.run(batch)
        anchors = prefilled.anchors
        result = prefilled.result
        batch.spec_info = DFlashState(anchors, self.next_draft.after_prefill(batch, anchors))
        # With a tensor, SGLang would merge it on the device with those of the running batches.
        batch.input_ids = anchors
        result.next_token_ids = prefilled.copy.wait().numpy()
        return result

    def clear_cache_pool(self) -> None:
        """Nothing to clear: slots and rows are the target's, and stale draft KV is never read."""

    def update_weights_from_ipc(self, recv_req: Any) -> tuple[bool, str]:
        """SGLang itself updates the target. The draft keeps its weights."""
        return True, NEW_WEIGHTS

    def update_weights_from_disk(self, recv_req: Any) -> tuple[bool, str]:
        """SGLang itself has updated the target, as above."""
        if recv_req.recapture_cuda_graph:
            self.graphs.capture()
        return True, NEW_WEIGHTS

    def before_new_weights(self) -> None:
        """SGLang may capture the target's graphs again, and it knows those of whole blocks only."""
        self._leave_verify()

    def _leave_verify(self) -> None:
        """Give SGLang the attention backend that it made, and drop what is planned on any."""
        self.verifier.drop_plan()
        self.graphs.use_whole()
