"""How much of a drafted block the target verifies: as much as pays best."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence

from sglang.srt.distributed import get_tp_group
from sglang.srt.model_executor.model_runner import ModelRunner
from torch import Tensor

from sglang_dflash.core.width import StepTimes, Survival, best_widths
from sglang_dflash.runtime.state import DFlashBlock

logger = logging.getLogger(__name__)

MOST_MEASURED = 64  # requests, in the rehearsal of steps
PROBE = 50  # steps between two that verify the whole block, so that every position is seen again
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
        self,
        step: Callable[[int, int], None],
        most: int,
        widths: Sequence[int],
        runner: ModelRunner,
    ) -> None:
        """step(batch, width) rehearses one; most: requests at a time; widths: N last."""
        measured = _measured_times(step, min(most, MOST_MEASURED), widths)
        logger.info("DFLASH: seconds of a step by (batch, width): %s", measured)
        device, self._block_size = runner.device, widths[-1]
        self._times = StepTimes(measured, widths, device)
        self._survival = Survival(self._block_size, device)
        # Graphs and backends of a GPU serve one width, and so do SGLang's 3-D positions.
        self._apart = device == "cpu" and not runner.model_is_mrope
        self._steps = itertools.count()

    def choose(self, block: DFlashBlock) -> DFlashBlock:
        """The part of the block that pays."""
        assert block.probability is not None
        if next(self._steps) % PROBE == 0:
            return block
        survival = self._survival(block.probability)
        return block.cut(best_widths(survival, self._times.at(len(survival)), self._apart))

    def observe(self, block: DFlashBlock, num_accepted: Tensor) -> None:
        assert block.probability is not None
        widths = block.draft_token_num if block.real is None else block.real.sum(1, keepdim=True)
        self._survival.observe(block.probability, num_accepted, widths)


def _measured_times(
    step: Callable[[int, int], None], most: int, widths: Sequence[int]
) -> dict[tuple[int, int], float]:
    """Seconds of `step` on a grid of batches and widths, equal on all ranks."""
    batches = [2**i for i in range(most.bit_length()) if 2**i < most] + [most]
    if len(widths) > 4:
        widths = widths[0], widths[-1] // 2, widths[-1]
    seconds = dict.fromkeys(itertools.product(batches, widths), math.inf)
    for _, (batch, width) in itertools.product(range(REPEATS), seconds):
        started = time.perf_counter()
        step(batch, width)
        seconds[batch, width] = min(seconds[batch, width], time.perf_counter() - started)
    return get_tp_group().broadcast_object(seconds, src=0)
