"""Expected throughput of a number of rows: the tokens that they commit, by the time of the step."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]


def best_rows(options: Sequence[int], requests: int, gains: Array, seconds: Array) -> int:
    """The number of rows that commits most tokens a second, one of `options`.

    gains: [N], tokens that a request commits at 1..N rows a request, the mean over the batch;
    seconds: of a step, for each option.
    """
    rows_each = np.array(options) / requests
    commits = np.interp(rows_each, np.arange(1, len(gains) + 1), gains)
    return options[int((commits / seconds).argmax())]


class StepTimes:
    """Seconds of a step by requests and rows, interpolated between those that were measured."""

    def __init__(self, drafts: dict[int, float], verifies: dict[tuple[int, int], float]) -> None:
        """drafts: by requests; verifies: by requests and rows, for the same requests."""
        self._drafts = dict(sorted(drafts.items()))
        self._batches = list(self._drafts)
        self._verifies: dict[int, dict[int, float]] = {batch: {} for batch in self._batches}
        for (requests, rows), seconds in sorted(verifies.items()):
            self._verifies[requests][rows] = seconds

    def at(self, requests: int, options: Sequence[int]) -> Array:
        """Seconds of a step for each number of rows, [len(options)] float64.

        Verifies take those of the smallest measured batch that holds these requests, else of the
        largest.
        """
        draft = np.interp(requests, self._batches, list(self._drafts.values()))
        batch = self._batches[bisect.bisect_left(self._batches[:-1], requests)]
        rows, seconds = map(np.array, zip(*self._verifies[batch].items(), strict=True))
        beyond = np.maximum(np.array(options) - rows[-1], 0)
        slope = (seconds[-1] - seconds[0]) / max(1, rows[-1] - rows[0])
        verify: Array = np.interp(options, rows, seconds) + slope * beyond
        return draft + verify


def without_outliers(seconds: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """Times of forwards by (requests, rows), at most those of larger forwards.

    Time grows with both, and noise can only lengthen it.
    """
    return {
        (requests, rows): min(
            other for (more, wider), other in seconds.items() if more >= requests and wider >= rows
        )
        for requests, rows in seconds
    }
