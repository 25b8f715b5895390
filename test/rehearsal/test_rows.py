"""The kernels that choose the rows of a verify equal their references."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash.kernels.rows import (
    choose_rows_in_torch,
    launch_choose_rows,
    launch_learn_survival,
    launch_survival,
)
from sglang_dflash.method.survival import SurvivalTable, learn, survival

CUDA = "cuda"


def drafted(requests: int, drafts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities, apart in memory, some of them 0 or 1, and the kinds of the requests."""
    probabilities = torch.rand(requests, drafts + 2)[:, :drafts]
    probabilities[torch.rand(requests, drafts) < 0.2] = 1.0
    probabilities[torch.rand(requests, drafts) < 0.1] = 0.0
    return probabilities, torch.randint(2, (requests,))


def copied(table: SurvivalTable) -> SurvivalTable:
    return SurvivalTable(*(counts.clone().to(CUDA) for counts in table))


@pytest.mark.parametrize(("requests", "drafts"), [(1, 1), (5, 7), (33, 15)])
def test_survival(requests: int, drafts: int) -> None:
    """What a table has learned in several steps, and what it says then."""
    torch.manual_seed(requests)
    table = SurvivalTable.empty(drafts + 1, "cpu")
    ours = copied(table)
    for _ in range(4):
        asked = drafted(requests, drafts)
        outcome = torch.randint(1, drafts + 2, (requests, 3))
        accepted, widths = outcome[:, 0] - 1, outcome[:, 2]
        accepted = torch.minimum(accepted, widths - 1)
        learn(*asked, accepted, widths, table)
        # columns of a tensor, as those of an outcome
        found, cut = torch.stack([accepted, widths], dim=1).to(CUDA).unbind(1)
        probabilities, kinds = (each.to(CUDA) for each in asked)
        launch_learn_survival(probabilities, kinds, found, cut, ours)
        for counts, wanted in zip(ours, table, strict=True):
            torch.testing.assert_close(counts.cpu(), wanted)
    assert any(bool((counts[kind] > 0).any()) for counts in table for kind in (0, 1))
    asked = drafted(requests, drafts)
    probabilities, kinds = (each.to(CUDA) for each in asked)
    scores = launch_survival(probabilities, kinds, ours).cpu()
    torch.testing.assert_close(scores, survival(*asked, table))
    assert bool((scores.diff(dim=1) <= 0).all())


@pytest.mark.parametrize(("requests", "drafts"), [(1, 7), (5, 7), (20, 15), (3, 2)])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_rows(requests: int, drafts: int, share: float) -> None:
    """Equal scores, also of 0, are chosen in order, as many as there is room for."""
    torch.manual_seed(drafts)
    scores = torch.rand(requests, drafts).cumprod(dim=1)
    scores = torch.where(scores > 0.5, 0.5, scores)  # equal ones
    scores[0, drafts // 2 :] = 0.0
    count = requests + round(share * requests * drafts)
    wanted = choose_rows_in_torch(scores, count)
    found = launch_choose_rows(scores.to(CUDA), count)
    assert torch.equal(found.lens.cpu(), wanted.lens)
    assert torch.equal(found.indices.cpu(), wanted.indices)
    torch.testing.assert_close(found.gains.cpu(), wanted.gains)
