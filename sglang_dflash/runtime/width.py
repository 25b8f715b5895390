"""How much of a block is drafted, and how much of that verified: as much as pays best."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.model_executor.model_runner import ModelRunner
from torch import Tensor

from sglang_dflash.core.width import Array, StepTimes, Survival, best_width
from sglang_dflash.cpu.widths import Outlook, best_widths
from sglang_dflash.runtime.state import DFlashBlock

logger = logging.getLogger(__name__)

MOST_MEASURED = 64  # requests, in the rehearsal of steps
PROBE = 50  # steps between two that verify all that was drafted, so that it is seen again
REPEATS = 3
WORTH = 1.1  # how much faster steps must become at best for the host to wait for a draft

Rehearse: TypeAlias = Callable[[int, int, bool], None]  # batch, width, a draft or a verify


class Widths:
    """The target's attention backend and graphs, which verify one width, for each of these."""

    def __init__(self, runner: ModelRunner, widths: Sequence[int]) -> None:
        self._runner, self._widths = runner, widths
        self.make()

    def make(self) -> None:
        """The pairs of all widths but the whole block's, which the runner has."""
        runner, args, graphs = self._runner, self._runner.server_args, self._runner.graph_runner
        block_size = args.speculative_num_draft_tokens
        self._parts = {block_size: (runner.attn_backend, graphs)}
        for width in set(self._widths) - {block_size}:
            args.speculative_num_draft_tokens = width  # what both are made for
            backend = runner._get_attention_backend()
            self._parts[width] = backend, graphs and type(graphs)(runner, attn_backend=backend)
        args.speculative_num_draft_tokens = block_size

    def use(self, width: int) -> None:
        """Verify this width from now on; a prefill runs on any."""
        self._runner.attn_backend, self._runner.graph_runner = self._parts[width]


class BestWidths:
    """The widths whose expected commits a second are highest, chosen for every batch."""

    def __init__(
        self, rehearse: Rehearse, widths: Sequence[int], runner: ModelRunner, draft: ModelRunner
    ) -> None:
        """widths: those to choose from, ascending, N last."""
        # Graphs and backends of a GPU serve one width, and so do SGLang's 3-D positions.
        self._apart = runner.device == "cpu" and not runner.model_is_mrope
        self._block_size = widths[-1]
        most = min(runner.server_args.max_running_requests, MOST_MEASURED)
        self._cuts = self._apart and draft.model.dflash.variable_block_size
        drafted = widths if self._cuts else widths[-1:]
        self._drafting = _measured(rehearse, most, drafted, True)
        self._verifying = _measured(rehearse, most, widths, False)
        self._survival = Survival(self._block_size)
        self._outlook = Outlook(len(runner.req_to_token_pool.req_to_token), self._block_size)
        self._steps = itertools.count()
        self._verified: tuple[Array, Array] | None = None  # of this step: probabilities and widths

    def forget(self, rows: Tensor) -> None:
        """New requests are in these rows, [B] int64."""
        if self._cuts:
            self._outlook.forget(rows.numpy())

    def to_draft(self, masked: DFlashBlock, rows: Tensor) -> DFlashBlock:
        """The part of a block of masks that is worth its draft: at least one draft a request."""
        if not self._cuts:
            return masked
        seconds = self._drafting.at(len(rows)) + self._verifying.at(len(rows))
        widths = best_widths(self._outlook(rows.numpy()), seconds).clip(min=2)
        return masked.cut(widths - self._block_size + masked.draft_token_num)

    def can_gain(self, batch: int) -> bool:
        """Whether a narrower verify of so many requests saves more than a look at the draft costs.

        On a GPU that look leaves the device without work until the verify is planned.
        """
        if self._apart:
            return True
        seconds = self._drafting.at(batch)[-1] + self._verifying.at(batch)
        return bool(seconds[-1] > WORTH * seconds.min())

    def to_verify(self, block: DFlashBlock, rows: Tensor) -> DFlashBlock:
        """The part of a drafted block that is worth its verify; the host waits for the draft."""
        self._verified = None
        if not self.can_gain(len(rows)):
            return block
        assert block.probability is not None
        said, batch = block.probability.cpu().numpy(), len(rows)
        survival, drafts = self._survival(said), np.full(batch, self._block_size - 1)
        if self._cuts:
            drafts = (said > 0).sum(axis=1)
            self._outlook.observe(rows.numpy(), survival, said > 0)
        seconds = self._drafting.at(batch)[drafts, None] + self._verifying.at(batch)
        if next(self._steps) % PROBE == 0:
            widths = drafts + 1
        elif self._apart:
            widths = best_widths(survival, seconds)
        else:
            widths = np.full(batch, best_width(survival, seconds[0]))
        self._verified = said, widths
        return block.cut(widths)

    def observe(self, num_accepted: Array) -> None:
        """Learn from the step of the last `to_verify`. num_accepted: [B] int64."""
        if self._verified is not None:
            said, widths = self._verified
            self._survival.observe(said, num_accepted, widths)


@torch.no_grad()
def _measured(rehearse: Rehearse, most: int, widths: Sequence[int], draft: bool) -> StepTimes:
    """Seconds of a draft or a verify on a grid of batches and widths, equal on all ranks."""
    batches = [2**i for i in range(most.bit_length()) if 2**i < most] + [most]
    grid = {1, 2, widths[-1] // 2, widths[-1]} if len(widths) > 4 else widths
    seconds = dict.fromkeys(itertools.product(batches, grid), math.inf)
    for _, (batch, width) in itertools.product(range(REPEATS), seconds):
        started = time.perf_counter()
        rehearse(batch, width, draft)
        seconds[batch, width] = min(seconds[batch, width], time.perf_counter() - started)
    seconds = get_tp_group().broadcast_object(seconds, src=0)
    logger.info(f"DFLASH: seconds of a {'draft' if draft else 'verify'}: {seconds}")
    return StepTimes(seconds, widths)
