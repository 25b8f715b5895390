"""Medians, percentiles and spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def percentile(values: Sequence[float], p: float) -> float:
    """Interpolates linearly between the two nearest values. p is from 0 to 100."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * p / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """The median, and (max - min) / median."""
    median = statistics.median(values)
    return median, (max(values) - min(values)) / median if median else 0.0
