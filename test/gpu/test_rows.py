"""Verifies of the likeliest rows of a batch on a GPU: kernels, tokens, waits."""

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
from sglang_dflash.settings.options import VERIFY_WIDTH
from test.cuts import verify_any_rows
from test.gpu.conftest import (
    DRY_RUN,
    ON_GPU,
    Margins,
    ask,
    engine,
    part_only_at_near_ties,
    prompts,
    together,
)

pytestmark = ON_GPU


@pytest.mark.skipif(DRY_RUN, reason="nothing to compile for")
@pytest.mark.parametrize("requests", [1, 5, 64, 256])
def test_kernels_of_rows(requests: int) -> None:
    """The compiled kernels equal their references, and choose the same rows every time."""
    torch.manual_seed(requests)
    probabilities = torch.rand(requests, 15, device="cuda")
    probabilities = 1 - 10 ** (-5 * probabilities)  # products that may be rounded up
    probabilities[torch.rand_like(probabilities) < 0.4] = 1.0
    kinds = torch.randint(2, (requests,), device="cuda")
    accepted = torch.randint(16, (requests,), device="cuda")
    widths = torch.randint(1, 17, (requests,), device="cuda")
    accepted = torch.minimum(accepted, widths - 1)
    table, ours = (SurvivalTable.empty(16, "cuda") for _ in range(2))
    for _ in range(3):
        learn(probabilities, kinds, accepted, widths, table)
        launch_learn_survival(probabilities, kinds, accepted, widths, ours)
    for counts, wanted in zip(ours, table, strict=True):
        torch.testing.assert_close(counts, wanted)
    scores = launch_survival(probabilities, kinds, ours)
    torch.testing.assert_close(scores, survival(probabilities, kinds, table))
    assert bool((scores.diff(dim=1) <= 0).all())
    for count in {requests, requests * 7, requests * 16}:
        found, again = (launch_choose_rows(scores, count) for _ in range(2))
        reference = choose_rows_in_torch(scores, count)
        assert torch.equal(found.lens, reference.lens)
        assert torch.equal(found.indices, reference.indices)
        torch.testing.assert_close(found.gains, reference.gains)
        assert all(map(torch.equal, found, again))


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("backend", ["flashinfer", "fa3", "triton"])
def test_any_rows_change_no_token(monkeypatch: pytest.MonkeyPatch, backend: str, page: int) -> None:
    """Whole blocks and any parts of them give the same tokens, but for near-ties."""
    monkeypatch.setenv(VERIFY_WIDTH, "full")
    with engine(attention_backend=backend, page_size=page) as run:
        expected = together(run, prompts(6))
    monkeypatch.setenv(VERIFY_WIDTH, "auto")
    with engine(attention_backend=backend, page_size=page) as run:
        verified = verify_any_rows(run.worker)
        margins = Margins(run)
        reqs = ask(run, prompts(6))
    assert len(verified) > 6
    assert len({rows for requests, rows in verified if requests == 6}) > 2
    part_only_at_near_ties(reqs, margins, expected)
