"""The arithmetic of rows: survival of drafts, step times, and the rows that pay."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from sglang_dflash.adaptive.throughput import StepTimes, best_rows, without_outliers
from sglang_dflash.kernels.rows import choose_rows_in_torch
from sglang_dflash.method.survival import GREEDY, SAMPLED, SurvivalTable, learn, survival


def greedy(requests: int) -> Tensor:
    return torch.full((requests,), GREEDY)


def test_survival_learns_from_ragged_widths() -> None:
    """A draft behind a request's cut counts as neither right nor wrong."""
    said, accepted, widths = torch.full((2, 3), 0.9), torch.tensor([2, 1]), torch.tensor([4, 2])
    one, both = (SurvivalTable.empty(4, "cpu") for _ in range(2))
    learn(said, greedy(2), accepted, widths, both)
    learn(said[:1], greedy(1), accepted[:1], widths[:1], one)
    # the second request: its only draft, right
    learn(said[:1, :1], greedy(1), torch.tensor([1]), torch.tensor([2]), first_of(one))
    torch.testing.assert_close(both.right[GREEDY, :3], one.right[GREEDY, :3], rtol=0.02, atol=0.0)
    torch.testing.assert_close(both.tried[GREEDY, :3], one.tried[GREEDY, :3], rtol=0.02, atol=0.0)


def first_of(table: SurvivalTable) -> SurvivalTable:
    """A view of the counts of the first position."""
    return SurvivalTable(*(counts[:, ::3] for counts in table))


def test_survival_learns_what_a_probability_means() -> None:
    """Drafts of probability 0.9 are right half the time. Positions behind the cut learn, too."""
    table, rng = SurvivalTable.empty(5, "cpu"), torch.Generator().manual_seed(0)
    said, widths = torch.full((8, 4), 0.9), torch.full((8,), 2)
    assert float(survival(said, greedy(8), table)[0, 0]) == pytest.approx(0.9)
    for _ in range(400):
        right = torch.rand(8, 4, generator=rng) < 0.5
        learn(said, greedy(8), right.cumprod(dim=1).sum(dim=1).clamp(max=1), widths, table)
    found = survival(said, greedy(8), table)[0]
    np.testing.assert_allclose(found, [0.5, 0.25, 0.125, 0.0625], atol=0.05, rtol=0.2)
    sampled = survival(said, torch.full((8,), SAMPLED), table)
    assert float(sampled[0, 0]) == pytest.approx(0.9)


@pytest.mark.parametrize("rows", [3, 5, 8, 12])
def test_the_likeliest_rows(rows: int) -> None:
    """No other rows of a chain commit more. What is expected of any number is the sum of scores."""
    torch.manual_seed(rows)
    scores = torch.rand(3, 3).cumprod(dim=1)
    found = choose_rows_in_torch(scores, rows)
    assert int(found.lens.sum()) == rows == len(found.indices)
    requests = torch.arange(3).repeat_interleave(found.lens)
    assert torch.equal(found.indices // 4, requests)
    for request, width in enumerate(found.lens.tolist()):
        assert (found.indices[requests == request] % 4).tolist() == list(range(width))

    def commits(widths: tuple[int, ...]) -> float:
        return sum(float(scores[i, : width - 1].sum()) + 1 for i, width in enumerate(widths))

    possible = [each for each in itertools.product(range(1, 5), repeat=3) if sum(each) == rows]
    best = max(map(commits, possible))
    assert commits(tuple(found.lens.tolist())) == pytest.approx(best)
    if rows % 3 == 0:
        assert float(found.gains[rows // 3 - 1]) * 3 == pytest.approx(best)


def test_rows_pay() -> None:
    """They are more if drafts survive and if rows cost nothing."""
    sure, doubtful = (1 + np.append(0, (p ** np.arange(1, 8)).cumsum()) for p in (0.9, 0.3))
    options = range(4, 33, 4)
    flat, steep = np.ones(8), np.arange(1.0, 9.0)
    assert best_rows(options, 4, sure, flat) == best_rows(options, 4, doubtful, flat) == 32
    assert best_rows(options, 4, sure, 4 + steep) > best_rows(options, 4, doubtful, 4 + steep)
    assert best_rows(options, 4, doubtful, steep**2) == 4


def test_times_between_measured_points() -> None:
    verifies = {(1, 2): 1.0, (1, 4): 3.0, (5, 10): 5.0, (5, 20): 7.0}
    times = StepTimes({1: 1.0, 5: 3.0}, verifies)
    assert times.at(1, [2, 3, 4]).tolist() == [2.0, 3.0, 4.0]
    assert times.at(3, [6, 10, 15, 20]).tolist() == [7.0, 7.0, 8.0, 9.0]
    assert times.at(5, [10, 15, 20]).tolist() == [8.0, 9.0, 10.0]
    assert times.at(9, [20, 40]).tolist() == [10.0, 14.0]  # more requests than were measured


def test_slow_moments_do_not_count() -> None:
    """A forward takes no longer than a larger one: of more requests and rows."""
    quiet = {(1, 1): 2.0, (1, 4): 3.0, (2, 2): 4.0, (2, 8): 6.0, (4, 4): 6.0, (4, 16): 9.0}
    assert without_outliers(quiet) == quiet
    assert without_outliers(quiet | {(1, 1): 50.0, (2, 2): 60.0}) == quiet | {
        (1, 1): 3.0,
        (2, 2): 6.0,
    }
