"""How much of a drafted block the target verifies: as much as pays best."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable

import torch
from sglang.srt.distributed import get_tp_group

from sglang_dflash.core.width import StepTimes, Survival, best_width
from sglang_dflash.runtime.state import DFlashBlock
from sglang_dflash.runtime.verifier import Verified

PROBE = 50  # steps between two that verify the whole block, so that every position is seen again
REPEATS = 3


class BestWidth:
    """The width whose expected commits a second are highest, chosen for every batch."""

    def __init__(self, times: StepTimes, block_size: int, device: str) -> None:
        self._times, self._block_size = times, block_size
        self._survival = Survival(block_size, device)
        self._steps = itertools.count()

    def choose(self, block: DFlashBlock) -> int:
        assert block.probability is not None
        if next(self._steps) % PROBE == 0:
            return self._block_size
        survival = self._survival(block.probability)
        return best_width(survival, self._times.at(len(survival)).to(survival.device))

    def observe(self, verified: Verified) -> None:
        block = verified.block
        assert block.probability is not None
        self._survival.observe(block.probability, verified.num_accepted, block.draft_token_num)


def measured_times(
    step: Callable[[int, int], None], most: int, block_size: int
) -> dict[tuple[int, int], float]:
    """Seconds of `step(batch, width)` on a grid of both, equal on all ranks."""
    batches = [2**i for i in range(most.bit_length()) if 2**i < most] + [most]
    widths = sorted({2, max(2, block_size // 2), block_size})
    seconds = dict.fromkeys(itertools.product(batches, widths), math.inf)
    for _, (batch, width) in itertools.product(range(REPEATS), seconds):
        started = time.perf_counter()
        step(batch, width)
        seconds[batch, width] = min(seconds[batch, width], time.perf_counter() - started)
    shared = torch.tensor(list(seconds.values()), dtype=torch.float64)
    get_tp_group().broadcast(shared, src=0)
    return dict(zip(seconds, shared.tolist(), strict=True))
