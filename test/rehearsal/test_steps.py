"""The launches, copies and waits of a steady greedy step."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from sglang_dflash.settings.options import DRAFT_AHEAD
from test.checkpoints import prompt
from test.inprocess import InProcess
from test.rehearsal.device.memory import LOG
from test.rehearsal.mutation import mutate
from test.rehearsal.serving import Asked, N, answer, engine

DOCS = Path(__file__).parents[2] / "docs" / "performance.md"
OURS = "step/copies.py:wait event"
REST = [("fa3", "off", 16), ("flashinfer", "off", 1)]


def steady(run: InProcess, **options: Any) -> list[Any]:
    """Requests that are decoding."""
    options = N | {"max_new_tokens": 60} | options
    reqs = [run.add(prompt(970 + i, 20), **options) for i in range(4)]
    for _ in range(5):
        run.step()
    return reqs


def watched_step(run: InProcess) -> tuple[int, int, int, list[str]]:
    """Run a step. Returns its replays, the launches outside of them, copies, and who waited."""
    LOG.clear()
    run.step()
    return LOG.replays, len(LOG.launches), len(LOG.copies), list(LOG.waits)


@pytest.mark.parametrize(
    ("backend", "ahead", "page"),
    [
        *itertools.product(["fa3", "flashinfer", "triton"], ["on"], [1, 16]),
        *[("fa3", "off", 1), ("flashinfer", "off", 16)],
        *[pytest.param(*rest, marks=pytest.mark.full) for rest in REST],
    ],
)
def test_the_host_waits_once(
    small: Path, monkeypatch: pytest.MonkeyPatch, backend: str, ahead: str, page: int
) -> None:
    """The one wait is for the committed tokens."""
    monkeypatch.setenv(DRAFT_AHEAD, ahead)
    with engine(small, backend, page_size=page, cuda_graph_bs=[4]) as run:
        steady(run)
        for _ in range(2):
            replays, launches, copies, waits = watched_step(run)
            assert (replays, waits) == (2, [OURS])
    if ahead == "on":  # the default
        assert table()[backend, page] == (launches, copies, len(waits))


SAMPLED = [{"temperature": 0.8}, {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.01}]


@pytest.mark.parametrize("options", SAMPLED, ids=["plain", "filtered"])
def test_a_sampled_step(small: Path, options: dict[str, Any]) -> None:
    """It launches, copies and waits as often as a greedy one."""
    with engine(small, "fa3", cuda_graph_bs=[4]) as run:
        steady(run, **options)
        for _ in range(2):
            replays, launches, copies, waits = watched_step(run)
            assert (replays, waits) == (2, [OURS])
            assert table()["fa3", 1] == (launches, copies, 1)


def test_penalties_wait_for_nothing(small: Path) -> None:
    """The host has the output that they count."""
    penalties = {"frequency_penalty": 0.3, "repetition_penalty": 1.2, "min_new_tokens": 50}
    with engine(small, "fa3", cuda_graph_bs=[4]) as run:
        steady(run, **penalties)
        for _ in range(2):
            *_, waits = watched_step(run)
            assert waits == [OURS]


def test_counting_waits_for_nothing(small: Path) -> None:
    """Parts are timed by events on the device, which are read when they are over."""
    with engine(small, "fa3", cuda_graph_bs=[4]) as run:
        run.worker.report.count_steps({"model_name": "small"})
        steady(run)
        for _ in range(2):
            *_, waits = watched_step(run)
            assert waits == [OURS]

    def value(name: str) -> float:
        found = REGISTRY.get_sample_value(f"sglang:spec_{name}", {"model_name": "small"})
        assert found is not None
        return found

    assert value("commit_seconds_count") == 6  # steps
    for part in ("draft", "verify"):
        assert value(f"{part}_seconds_count") >= 5  # the last one is read later
        # A simulated event lasts 1 ms.
        assert value(f"{part}_seconds_sum") == pytest.approx(value(f"{part}_seconds_count") / 1e3)


def table() -> dict[tuple[str, int], tuple[int, ...]]:
    """Launches, copies and waits of a step, as the docs list them by backend and page size."""
    rows = re.findall(r"^\| (\w+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", DOCS.read_text(), re.M)
    return {(name, int(page)): tuple(map(int, rest)) for name, page, *rest in rows}


@pytest.mark.ci
def test_what_is_not_waited_for_is_not_read(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutation: the host reads values that the device has not written yet."""
    mutate(monkeypatch, "step.worker:DFlashWorker.land", "copy.wait()", "copy._copy")
    (asked,) = answer(small, {"one": Asked(prompt(1, 9), N)}).values()
    with engine(small, "fa3", cuda_graph_bs=[2]) as run:
        assert run.generate(asked.ids, **asked.options) != asked.answer["ids"]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("where", "old", "new"),
    [
        (
            "step.verify:Verifier._acceptable",
            "return tokens",
            "tokens.max().item(); return tokens",
        ),
        ("step.propose:Drafter._propose", "rows = batch", "_ = anchors.tolist(); rows = batch"),
    ],
)
def test_a_second_wait_is_seen(
    small: Path, monkeypatch: pytest.MonkeyPatch, where: str, old: str, new: str
) -> None:
    """Mutations: the host reads a value from the device."""
    mutate(monkeypatch, where, old, new)
    with engine(small, "fa3", cuda_graph_bs=[4]) as run:
        steady(run)
        *_, waits = watched_step(run)
    assert len(waits) == 2
    assert OURS in waits
