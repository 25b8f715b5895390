"""Prometheus counters of the worker, beside SGLang's own (--enable-metrics)."""

from __future__ import annotations


class StepCounters:
    """Counts over all requests: verify steps, and accepted drafts by block position."""

    def __init__(self, verify_width: int) -> None:
        from prometheus_client import Counter  # after SGLang has set its multiprocess directory

        self._steps = Counter("sglang:spec_verify_steps", "Verify steps, a request each.")
        by_position = Counter(
            "sglang:spec_accepted_tokens_per_position", "Accepted drafts by position.", ["position"]
        )
        self._positions = [by_position.labels(str(p)) for p in range(1, verify_width)]

    def observe(self, accepted: list[int]) -> None:
        """accepted: drafts that each request of a step took."""
        self._steps.inc(len(accepted))
        for position, counter in enumerate(self._positions, start=1):
            counter.inc(sum(a >= position for a in accepted))
