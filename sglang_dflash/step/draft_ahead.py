"""Draft ahead: queue the next block's draft before the host handles the step's results."""

from __future__ import annotations

from sglang.srt.managers.schedule_batch import ScheduleBatch
from torch import Tensor

from sglang_dflash.method.acceptance import Outcome
from sglang_dflash.step.copies import HostCopy
from sglang_dflash.step.policies import Drafted, VerifyWidth
from sglang_dflash.step.prefill import all_start_to_decode
from sglang_dflash.step.propose import Drafter
from sglang_dflash.step.slots import Slots
from sglang_dflash.step.verify import Verifier, VerifyResult


class DraftLater:
    """Draft at the beginning of the next step."""

    def after_prefill(self, batch: ScheduleBatch, anchors: Tensor) -> None:
        return None

    def after_verify(self, batch: ScheduleBatch, verified: VerifyResult, copy: HostCopy) -> None:
        return None


class DraftAhead:
    """Draft at once, and plan the verify of the draft."""

    def __init__(
        self,
        drafter: Drafter,
        verifier: Verifier,
        slots: Slots,
        verify_width: VerifyWidth,
        context_len: int,
        exact_lengths: bool,
        plans: bool,
    ) -> None:
        """exact_lengths: the draft is planned by true lengths, so it waits for them.

        plans: verifies are planned ahead.
        """
        self._drafter = drafter
        self._verifier = verifier
        self._slots = slots
        self._verify_width = verify_width
        self._context_len = context_len
        self._exact_lengths = exact_lengths
        self._plans = plans

    def after_prefill(self, batch: ScheduleBatch, anchors: Tensor) -> Drafted | None:
        if not all_start_to_decode(batch) or not batch.check_decode_mem():
            return None
        self._slots.reserve(batch.reqs)
        lens = batch.seq_lens, batch.seq_lens_cpu
        return Drafted(self._drafter.propose(batch, anchors, *lens))

    def after_verify(self, batch: ScheduleBatch, verified: VerifyResult, copy: HostCopy) -> Drafted:
        accepted = verified.accepted
        rows = batch.req_pool_indices
        most_committed: Tensor | int = verified.block.width
        if self._exact_lengths:
            most_committed = Outcome.unpack(copy.wait()).num_accepted + 1
        # Only a request that ends in this step can exceed the context length.
        seq_lens_cpu = (batch.seq_lens_cpu + most_committed).clamp(max=self._context_len)
        block = self._drafter.propose(batch, accepted.bonus, accepted.lens, seq_lens_cpu)
        if not self._plans:
            return Drafted(block)
        choice = self._verify_width.choose(block, batch.reqs)
        self._verifier.plan(rows, choice.block, accepted.lens, seq_lens_cpu)
        return Drafted(block, choice)
