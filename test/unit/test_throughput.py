"""The arithmetic of verify widths: survival of drafts, step times, and the widths that pay."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from sglang_dflash.adaptive.throughput import (
    Array,
    StepTimes,
    Survival,
    common_width,
    own_widths,
    without_outliers,
)


def test_survival_learns_from_ragged_widths() -> None:
    """A draft behind a request's cut counts as neither right nor wrong."""
    said, accepted, widths = np.full((2, 3), 0.9), np.array([2, 1]), np.array([4, 2])
    one, both = Survival(4), Survival(4)
    both.observe(said, accepted, widths)
    one.observe(said[:1], accepted[:1], widths[:1])
    one._tried[0] += one._right[0]  # the second request: its only draft, right
    one._right[0] *= 2
    np.testing.assert_allclose(both(said), one(said), rtol=1e-6)


def test_survival_learns_what_a_probability_means() -> None:
    """Drafts of probability 0.9 are right half the time. Positions behind the cut learn, too."""
    survival, rng = Survival(5), np.random.default_rng(0)
    said, widths = np.full((8, 4), 0.9), np.full(8, 2)
    assert survival(said)[0, 0] == pytest.approx(0.9)
    for _ in range(400):
        right = rng.random((8, 4)) < 0.5
        survival.observe(said, right.cumprod(axis=1).sum(axis=1).clip(max=1), widths)
    expected = [0.5, 0.25, 0.125, 0.0625]
    np.testing.assert_allclose(survival(said)[0], expected, atol=0.05, rtol=0.2)


@pytest.mark.parametrize("apart", [False, True])
def test_width_pays(apart: bool) -> None:
    """The width is larger if drafts survive and if positions cost nothing."""
    sure, doubtful = (np.full((4, 7), p).cumprod(axis=1) for p in (0.9, 0.3))
    flat, steep = np.ones(8), np.arange(1.0, 9.0)

    def best(survival: Array, seconds: Array) -> list[int]:
        if apart:
            widths: list[int] = own_widths(survival, seconds).tolist()
            return widths
        return [common_width(survival, seconds)] * 4

    assert best(sure, flat) == best(doubtful, flat) == [8] * 4
    assert min(best(sure, 4 + steep)) > max(best(doubtful, 4 + steep))
    assert best(doubtful, steep**2) == [1] * 4


def test_times_between_measured_points() -> None:
    measured = {(1, 2): 1.0, (1, 4): 3.0, (5, 2): 5.0, (5, 4): 7.0}
    times = StepTimes(measured, (2, 3, 4))
    assert times.at(1).tolist() == [math.inf, 1.0, 2.0, 3.0]
    assert times.at(3).tolist() == times.at(5).tolist() == [math.inf, 5.0, 6.0, 7.0]


def test_slow_moments_do_not_count() -> None:
    """A forward takes no longer than a larger one: of more requests, or of more positions."""
    quiet = np.array([[1.0, 2.0, 3.0, 4.0], [2.0, 4.0, 6.0, 8.0], [3.0, 6.0, 9.0, 12.0]])
    assert (without_outliers(quiet) == quiet).all()
    busy = quiet.copy()
    busy[0, 1], busy[1, 2], busy[1, 0] = 50.0, 60.0, 70.0
    expected = quiet.copy()
    expected[0, 1], expected[1, 2], expected[1, 0] = 3.0, 8.0, 3.0
    assert (without_outliers(busy) == expected).all()


def test_only_widths_on_offer_are_chosen() -> None:
    times = StepTimes({(1, 4): 1.0, (1, 8): 1.2}, (4, 8)).at(1)
    assert np.isinf(times).tolist() == [True, True, True, False, True, True, True, False]
    sure, doubtful = (np.full((1, 7), p).cumprod(axis=1) for p in (0.9, 0.1))
    assert (common_width(sure, times), common_width(doubtful, times)) == (8, 4)


def test_requests_are_finished_soonest() -> None:
    """The chosen widths give the least total time of four requests on two places, of all widths.

    A place is never empty, so the number of steps is half of the sum over the requests. A step with
    two requests takes the mean of the times of two steps that have one of the requests twice.
    """
    survival = np.array([[0.9, 0.8, 0.7], [0.4, 0.1, 0.02], [0.6, 0.5, 0.1], [1.0, 1.0, 1.0]])
    commits = 1 + np.pad(survival.cumsum(axis=1), ((0, 0), (1, 0)))
    tokens, totals = np.array([70, 120, 40, 200]), []
    for price in (0.05, 0.3, 1.0, 3.0):
        taken = 1 + price * np.arange(4.0)

        def takes(widths: Sequence[int], taken: Array = taken) -> float:
            drafts = np.array(widths) - 1
            time: float = (tokens / commits[range(4), drafts] * taken[drafts]).sum() / 2
            return time

        chosen = own_widths(survival, taken).tolist()
        tried = itertools.product(range(1, 5), repeat=4)
        assert takes(chosen) == pytest.approx(min(map(takes, tried)))
        totals.append(sum(chosen))
    assert totals == sorted(totals, reverse=True)
    assert totals[0] > totals[-1] == 4


def test_a_request_is_cut_by_its_own_drafts() -> None:
    """Sure drafts of other requests do not reduce its width. It would then run longer."""
    sure, code = np.full(3, 1.0), np.array([0.6, 0.3, 0.1])
    taken = np.array([1.0, 1.2, 1.4, 1.6])
    alone = own_widths(code[None], taken).tolist()
    assert alone == [3]
    assert own_widths(np.stack([code, *[sure] * 7]), taken).tolist() == alone + [4] * 7
