"""The verify width: how many positions of a drafted block the target verifies.

A policy is made once, at construction. `choose` cuts a block; the choice then learns from the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from sglang.srt.managers.schedule_batch import Req
from torch import Tensor

from sglang_dflash.adaptive.throughput import Array, StepTimes, Survival, common_width, own_widths
from sglang_dflash.method.block import Block
from sglang_dflash.step.noise import is_sampled

PROBE = 50  # steps between two that verify whole blocks, so that all positions are seen again
WORTH = 1.1  # the host waits for a draft only if a step can get this much faster


@dataclass(frozen=True)
class FixedChoice:
    """A choice from which nothing is learned."""

    block: Block

    def learn(self, num_accepted: Tensor) -> None:
        pass


class FixedWidth:
    """Verify the first `width` positions of every block."""

    def __init__(self, width: int, block_size: int) -> None:
        self._width, self._block_size = width, block_size

    def choose(self, block: Block, reqs: list[Req]) -> FixedChoice:
        return FixedChoice(block.first(self._width))

    def verifies_whole(self, requests: int) -> bool:
        return self._width == self._block_size


@dataclass(frozen=True)
class AdaptiveChoice:
    """A choice by the draft's probabilities."""

    block: Block
    probabilities: Array  # [B, N-1] float32, of the whole block's drafts
    widths: Array  # [B] int64
    kinds: list[tuple[Survival, Array]]  # of drafts, and which requests have each, [B] bool

    def learn(self, num_accepted: Tensor) -> None:
        accepted = num_accepted.numpy()
        for survival, of in self.kinds:
            survival.observe(self.probabilities[of], accepted[of], self.widths[of])


class AdaptiveWidth:
    """Verify the widths with the most expected commits per second.

    The policy combines two estimates: the acceptance of each draft, from its probability calibrated
    online, and the times of steps, measured at startup. Drafts that share the noise of a draw are
    calibrated apart from those of greedy requests.
    """

    def __init__(self, block_size: int, step_times: StepTimes, ragged: bool) -> None:
        """ragged: the requests of a batch may have different widths."""
        self._block_size, self._step_times, self._ragged = block_size, step_times, ragged
        self._greedy, self._sampled = Survival(block_size), Survival(block_size)
        self._steps = 0

    def choose(self, block: Block, reqs: list[Req]) -> FixedChoice | AdaptiveChoice:
        """The host waits for the draft, unless the block is verified whole in any case."""
        requests = len(block.slots)
        if self.verifies_whole(requests):
            return FixedChoice(block)
        assert block.probabilities is not None
        probabilities = block.probabilities.cpu().numpy()
        sampled = np.array([is_sampled(req) for req in reqs])
        kinds = [(self._greedy, ~sampled), (self._sampled, sampled)]
        kinds = [(survival, of) for survival, of in kinds if of.any()]
        widths = self._widths(probabilities, kinds)
        return AdaptiveChoice(block.cut(widths), probabilities, widths, kinds)

    def verifies_whole(self, requests: int) -> bool:
        """Narrower verifies of so many requests save less than waiting for the draft costs.

        On a GPU this wait leaves the device idle until the verify is planned. Attention over
        ragged widths plans every verify in any case, so there the result is False.
        """
        if self._ragged:
            return False
        seconds = self._step_times.at(requests)
        return bool(seconds[-1] <= WORTH * seconds.min())

    def _widths(self, probabilities: Array, kinds: list[tuple[Survival, Array]]) -> Array:
        requests = len(probabilities)
        is_probe = self._steps % PROBE == 0
        self._steps += 1
        if is_probe:
            return np.full(requests, self._block_size)
        survival, seconds = np.empty_like(probabilities), self._step_times.at(requests)
        for of_kind, of in kinds:
            survival[of] = of_kind(probabilities[of])
        if self._ragged:
            return own_widths(survival, seconds)
        return np.full(requests, common_width(survival, seconds))
