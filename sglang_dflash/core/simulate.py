"""A fixed sequence of accepted lengths, to time two implementations on equal work."""

from __future__ import annotations

import functools
import math
import random


def simulated_commit(step: int, accept_length: float, width: int, seed: int = 0) -> int:
    """Tokens that a request commits in its verify step number `step` (from 0): 1 to `width`.

    Always the whole number below or above `accept_length`, and after any number of steps the sum is
    within 1 of `steps * accept_length`. The seed sets where in the pattern it begins.
    """
    phase = _phase(seed)
    commit = math.floor((step + 1) * accept_length + phase) - math.floor(
        step * accept_length + phase
    )
    return max(1, min(commit, width))


@functools.cache
def _phase(seed: int) -> float:
    return random.Random(seed).random()
