"""A fixed sequence of accepted lengths, to time two implementations on equal work."""

from __future__ import annotations

PHASE = 0.8444  # where in the pattern a request begins


def simulated_commit(step: int, accept_length: float, width: int) -> int:
    """Tokens that a request commits in its verify step number `step` (from 0): 1 to `width`.

    The result is always one of the two whole numbers next to `accept_length`. After any number of
    steps, the sum is within 1 of `steps * accept_length`. `width` may limit both.
    """
    before = int(step * accept_length + PHASE)
    after = int((step + 1) * accept_length + PHASE)
    return max(1, min(after - before, width))
