"""The verify width: which positions of the drafted blocks of a batch the target verifies.

A policy is made once, at construction. `choose` cuts a block; the choice then learns from the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from sglang.srt.managers.schedule_batch import Req
from torch import Tensor
from torch.nn import functional as F

from sglang_dflash.adaptive.throughput import Array, StepTimes, best_rows
from sglang_dflash.kernels import Kernels
from sglang_dflash.kernels.rows import Rows
from sglang_dflash.method.acceptance import Outcome
from sglang_dflash.method.block import Block
from sglang_dflash.method.survival import GREEDY, SAMPLED, SurvivalTable
from sglang_dflash.step.copies import HostCopy, to_device
from sglang_dflash.step.noise import is_sampled

PROBE = 50  # steps between two that verify whole blocks, so that all positions are seen again
WORTH = 1.05  # blocks are cut only where a step can get this much faster
RECENT = 0.25  # the weight of a step among those whose gains are known


class Shapes(Protocol):
    """What the target can verify."""

    ragged: bool  # whether the requests of a batch may have different numbers of rows

    @property
    def most_measured(self) -> int:
        """Requests of the largest batch whose times are measured."""

    def options(self, requests: int) -> list[int]:
        """The numbers of rows of so many requests, ascending. The last one is of whole blocks."""

    def measured(self, requests: int) -> list[int]:
        """Those of them whose times are measured, the first and the last among them."""


@dataclass(frozen=True)
class FixedChoice:
    """A choice from which nothing is learned."""

    block: Block

    def learn(self, outcome: Outcome) -> None:
        pass


class FixedWidth:
    """Verify the first `width` positions of every block."""

    def __init__(self, width: int) -> None:
        self._width = width

    def choose(self, block: Block, reqs: list[Req]) -> FixedChoice:
        return FixedChoice(block.first(self._width))


@dataclass(frozen=True)
class AdaptiveChoice:
    """A choice by the draft's probabilities."""

    block: Block
    learn: Callable[[Outcome], None]


class AdaptiveWidth:
    """Verify as many rows as commit most tokens a second, and the likeliest ones.

    The number comes from two estimates: what rows would have gained in the steps before, and the
    times of steps, measured at startup. The rows are chosen on the device, which may still be
    drafting. Where they must be equally many of each request, they are the first ones.
    """

    def __init__(
        self,
        block_size: int,
        step_times: StepTimes,
        shapes: Shapes,
        kernels: Kernels,
        device: str,
        queues_work: bool,
    ) -> None:
        """queues_work: the host would have to wait for the gains of a step's own drafts."""
        self._step_times, self._shapes = step_times, shapes
        self._kernels = kernels
        self._queues_work = queues_work
        self._survival = SurvivalTable.empty(block_size, device)
        self._gains: Array | None = None  # [N], of the steps before, as `best_rows` takes them
        self._steps = 0

    def choose(self, block: Block, reqs: list[Req]) -> FixedChoice | AdaptiveChoice:
        requests = len(reqs)
        options = self._shapes.options(requests)
        seconds = self._step_times.at(requests, options)
        if seconds[-1] <= WORTH * seconds.min():
            return FixedChoice(block)
        probabilities = block.probabilities
        assert probabilities is not None
        kinds = [SAMPLED if is_sampled(req) else GREEDY for req in reqs]
        given = probabilities, to_device(kinds, probabilities.device)
        scores = self._kernels.survival(*given, self._survival)
        known = self._gains if self._queues_work else self._gains_of(scores).numpy()
        is_probe = self._steps % PROBE == 0
        self._steps += 1
        count = options[-1]
        if not is_probe and known is not None:
            count = best_rows(options, requests, known, seconds)
        cut, gains = self._cut(block, scores, count)
        copy = HostCopy(gains)

        def learn(outcome: Outcome) -> None:
            self._kernels.learn_survival(
                *given, outcome.num_accepted, outcome.widths, self._survival
            )
            self._remember(copy.arrived().numpy())

        return AdaptiveChoice(cut, learn)

    def _cut(self, block: Block, scores: Tensor, count: int) -> tuple[Block, Tensor]:
        """The part of a block that has so many rows, and `_gains_of` these scores."""
        if not self._shapes.ragged:
            return block.first(count // len(scores)), self._gains_of(scores)
        rows: Rows = self._kernels.choose_rows(scores, count)
        return block if count == block.rows else block.cut(rows.ragged), rows.gains

    def _gains_of(self, scores: Tensor) -> Tensor:
        """What 1..N rows a request would be worth, `Rows.gains`: [N] float32. scores: [B, M]."""
        if self._shapes.ragged:
            gains: Tensor = self._kernels.choose_rows(scores, len(scores)).gains
            return gains
        return F.pad(scores.mean(dim=0).cumsum(dim=0), (1, 0)) + 1.0

    def _remember(self, gains: Array) -> None:
        known = gains if self._gains is None else self._gains
        self._gains = known + RECENT * (gains - known)
