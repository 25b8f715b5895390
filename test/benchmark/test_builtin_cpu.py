"""Tests of the distribution that lets the built-in run on a CPU: inert unless named, and exact."""

from __future__ import annotations

from importlib.metadata import entry_points
from types import SimpleNamespace

import dflash_builtin_bench
import dflash_simulated_survival
import dflash_step_timers
import numpy as np
import pytest
import torch
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_dflash.method.simulate import simulated_commit

pytestmark = pytest.mark.sglang


VERIFY = "sglang.srt.speculative.dflash_info.DFlashVerifyInput.verify"
ASSIGN = "sglang.srt.speculative.spec_utils.assign_req_to_token_pool_func"


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the hooks that `install()` registers."""
    names: list[str] = []
    monkeypatch.setattr(HookRegistry, "register", lambda target, *_: names.append(target))
    monkeypatch.delenv("SGLANG_SIMULATE_ACC_LEN", raising=False)
    monkeypatch.delenv(dflash_step_timers.PATH, raising=False)
    monkeypatch.delenv(dflash_simulated_survival.NAME, raising=False)
    return names


def test_all_are_found_by_sglang() -> None:
    found = {e.name: e.load() for e in entry_points(group="sglang.srt.plugins")}
    assert found["dflash_builtin_bench"] is dflash_builtin_bench.install
    assert found["dflash_step_timers"] is dflash_step_timers.install
    assert found["dflash_simulated_survival"] is dflash_simulated_survival.install


@pytest.mark.parametrize(
    "plugins", [None, "", "dflash_cpu", "dflash,dflash_cpu,dflash_builtin_bench"]
)
def test_inert_unless_named(
    plugins: str | None, registered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    if plugins is not None:
        monkeypatch.setenv("SGLANG_PLUGINS", plugins)
    dflash_builtin_bench.install()
    dflash_step_timers.install()
    dflash_simulated_survival.install()
    assert registered == []


@pytest.mark.parametrize("simulated", [False, True])
def test_named_it_registers(
    simulated: bool, registered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "dflash_cpu, dflash_builtin_bench")
    if simulated:
        monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "4.5")
    dflash_builtin_bench.install()
    assert registered.count(VERIFY) == 1 + simulated
    assert (ASSIGN in registered) != torch.cuda.is_available()


def test_slots_are_assigned_row_by_row() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, start = torch.tensor([3, 0, 5]), torch.tensor([2, 7, 0], dtype=torch.int32)
    end = start + torch.tensor([4, 0, 6], dtype=torch.int32)
    slots = torch.randperm(99, generator=generator)[:10]
    table = torch.zeros(6, 12, dtype=torch.int32)
    wanted, at = table.clone(), 0
    for row, a, b in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        wanted[row, a:b] = slots[at : at + b - a].int()
        at += b - a
    dflash_builtin_bench.assign_slots(rows, table, start, end, slots, 3)
    assert torch.equal(table, wanted)


def test_simulation_is_the_sequence_of_our_worker() -> None:
    steps = [0, 1, 7]
    batch = SimpleNamespace(
        sampling_info=SimpleNamespace(is_all_greedy=True),
        reqs=[SimpleNamespace(spec_verify_ct=step) for step in steps],
    )
    simulated = dflash_builtin_bench.SimulatedAcceptance(4.5)
    simulated.plan(SimpleNamespace(draft_token_num=8), batch=batch)
    predicted = torch.arange(24).view(3, 8)
    correct, bonus = simulated.correct_drafts_and_bonus(
        candidates=predicted, target_predict=predicted
    )
    commits = [simulated_commit(step, 4.5, 8) for step in steps]
    assert (correct + 1).tolist() == commits
    assert bonus.tolist() == [8 * i + commit - 1 for i, commit in enumerate(commits)]


@pytest.mark.parametrize(("profile", "accept_length"), [("math_500", 7.66), ("mt_bench", 4.28)])
def test_simulated_drafts_survive_as_published(profile: str, accept_length: float) -> None:
    """By position, and as often as their probabilities say. Some are sure and some are not."""
    published = np.array(dflash_simulated_survival.PROFILES[profile])
    assert 1 + published.cumprod().sum() == pytest.approx(accept_length, abs=0.01)
    probabilities, right = dflash_simulated_survival.drawn(published.tolist())
    alive = right[:, None] >= np.arange(16)
    found = alive[:, 1:].sum(axis=0) / alive[:, :-1].sum(axis=0)
    np.testing.assert_allclose(found[:8], published[:8], atol=0.03)
    first = right > 0
    for low, high in ((0.0, 0.5), (0.5, 0.9), (0.9, 0.99), (0.99, 1.0)):
        some = (probabilities[:, 0] > low) & (probabilities[:, 0] <= high)
        said = float(probabilities[some, 0].mean())
        assert float(first[some].mean()) == pytest.approx(said, abs=0.04)
    assert float((probabilities > 0.99).mean()) > 0.4
    assert float((probabilities < 0.5).mean()) > 0.05
