"""Acceptance counts beside SGLang's own: per request, and per server for Prometheus."""

from __future__ import annotations


class AcceptanceHistogram(list[int]):
    """SGLang's histogram of a request, and the drafts that were verified for it.

    Entry n counts the steps that accepted n drafts. It travels from the scheduler to the tokenizer
    process, where `hooks.meta_info` reads it. SGLang itself assumes that blocks are verified whole.
    """

    num_verified = 0


class StepCounters:
    """Prometheus counters: verify steps, and accepted drafts by block position."""

    def __init__(self, block_size: int) -> None:
        from prometheus_client import Counter  # after SGLang has set its multiprocess directory

        self._steps = Counter("sglang:spec_verify_steps", "Verify steps, counted per request.")
        by_position = Counter(
            "sglang:spec_accepted_tokens_per_position", "Accepted drafts by position.", ["position"]
        )
        self._positions = [by_position.labels(str(p)) for p in range(1, block_size)]

    def observe(self, accepted: list[int]) -> None:
        """accepted: drafts that each request of a step took."""
        self._steps.inc(len(accepted))
        for position, counter in enumerate(self._positions, start=1):
            counter.inc(sum(a >= position for a in accepted))
