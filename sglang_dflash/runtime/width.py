"""How much of a drafted block is verified: as much as pays best."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_dflash.core.width import Array, StepTimes, Survival, best_width, best_widths
from sglang_dflash.runtime.state import DFlashBlock

logger = logging.getLogger(__name__)

MOST_MEASURED = 64  # requests, in the rehearsal of steps
PROBE = 50  # steps between two that verify all that was drafted, so that it is seen again
REPEATS = 3


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
        self, rehearse: Callable[[int, int, bool], None], widths: Sequence[int], runner: ModelRunner
    ) -> None:
        """rehearse(batch, width, draft) runs a draft or a verify; widths: ascending, N last."""
        # Graphs and backends of a GPU serve one width, and so do SGLang's 3-D positions.
        self._apart = runner.device == "cpu" and not runner.model_is_mrope
        self._block_size = widths[-1]
        most = min(runner.server_args.max_running_requests, MOST_MEASURED)
        whole = widths[-1:]  # drafts see all masks of a block: with fewer they are worse
        self._drafting = StepTimes(_measured(rehearse, most, whole, True), whole)
        self._verifying = StepTimes(_measured(rehearse, most, widths, False), widths)
        self._survival = Survival(self._block_size)
        self._steps = itertools.count()

    def to_verify(self, block: DFlashBlock) -> DFlashBlock:
        """The part of a drafted block that is worth its verify; the host waits for the draft."""
        assert block.probability is not None
        said, batch = block.probability.cpu().numpy(), len(block.slots)
        survival = self._survival(said)
        seconds = self._drafting.at(batch)[-1] + self._verifying.at(batch)
        if next(self._steps) % PROBE == 0:
            widths = np.full(batch, self._block_size)
        elif self._apart:
            widths = best_widths(survival, seconds)
        else:
            widths = np.full(batch, best_width(survival, seconds))
        self._verified = said, widths
        return block.cut(widths)

    def observe(self, num_accepted: Array) -> None:
        """Learn from the step of the last `to_verify`. num_accepted: [B] int64."""
        said, widths = self._verified
        self._survival.observe(said, num_accepted, widths)


@torch.inference_mode()
def _measured(
    rehearse: Callable[[int, int, bool], None], most: int, widths: Sequence[int], draft: bool
) -> dict[tuple[int, int], float]:
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
    return seconds
