"""Chaos, for a minute, and the ends of a server. `python -m test.chaos` takes longer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from test.chaos.__main__ import survive
from test.chaos.apart import survive_apart
from test.chaos.deaths import DEATHS, killed_detokenizer

pytestmark = pytest.mark.ci


def check(counts: Counter[str]) -> None:
    """All that chaos does has happened, and most requests were answered to the end."""
    for way in ("whole", "stream", "leave", "abort", "flush", "pause", "stall", "bad_body"):
        assert counts[way] > 0, counts
    assert counts["retractions"] > 0
    assert counts["answered in full"] > (counts["whole"] + counts["stream"]) / 2, counts


def test_nothing_is_lost() -> None:
    check(survive(seconds=75, seed=1))


@pytest.mark.full
def test_prefill_and_decode_apart() -> None:
    """In CI, test_disaggregation_apart.py kills two of their processes."""
    check(survive_apart(seconds=300, seed=1))


@pytest.mark.parametrize(
    "death",
    [
        pytest.param(each, marks=pytest.mark.full) if each is killed_detokenizer else each
        for each in DEATHS
    ],
    ids=lambda death: death.__name__,
)
def test_ends(death: Callable[[], None]) -> None:
    death()
