"""A verify plan that is made ahead is used once, and only for the block that it was made for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_dflash.settings.options import DRAFT_AHEAD, VERIFY_WIDTH
from test.checkpoints import prompt
from test.inprocess import InProcess
from test.worker.conftest import Alone


class Graphs:
    """Replaces CUDA graphs, which a CPU does not have, and records the plans for them."""

    def __init__(self) -> None:
        self.planned: list[ForwardBatch] = []

    def can_run(self, forward: ForwardBatch) -> bool:
        return True

    def replay_prepare(self, forward: ForwardBatch) -> None:
        self.planned.append(forward)


REQUESTS = [
    (prompt(700 + i, 12 + i), {"max_new_tokens": 10 + 6 * i, "ignore_eos": True}) for i in range(4)
]


@pytest.fixture
def expected(alone: Alone) -> list[list[int]]:
    return [answer["ids"] for answer in alone(REQUESTS)]


@pytest.fixture
def engine(target: str, draft: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[InProcess]:
    monkeypatch.setenv(DRAFT_AHEAD, "on")
    monkeypatch.setenv(VERIFY_WIDTH, "full")
    # Here the modules run the planned forward, and plan their attention for it again.
    monkeypatch.setattr(ForwardBatch, "mark_forward_metadata_ready", lambda forward: None)
    with InProcess(target, draft) as engine:
        engine.worker.model_runner.graph_runner = Graphs()
        yield engine


def watched(engine: InProcess, monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """A list that gets, for each verify, whether it was planned and its number of requests."""
    seen: list[tuple[bool, int]] = []
    verifier, target = engine.worker.verifier, engine.worker.target_worker
    forward = target.forward_batch_generation

    def noted(batch: Any, forward_batch: Any = None, **options: Any) -> Any:
        if forward_batch is None:
            seen.append((False, len(batch.reqs)))
        elif forward_batch.forward_mode.is_target_verify():
            assert forward_batch is verifier._runner.graph_runner.planned[-1]
            # SGLang keeps buffers between forwards, and fills them outside of inference mode.
            assert not forward_batch.input_ids.is_inference()
            seen.append((True, forward_batch.batch_size))
        return forward(batch, forward_batch, **options)

    monkeypatch.setattr(target, "forward_batch_generation", noted)
    return seen


def test_planned_steps_give_the_same_tokens(
    expected: list[list[int]], engine: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests join and end in different steps. A plan for another batch is not used."""
    seen = watched(engine, monkeypatch)
    reqs = []
    for ids, options in REQUESTS:
        reqs.append(engine.add(ids, **options))
        engine.step()
        engine.step()
        engine.step()
    engine.run(*reqs)
    assert [list(req.output_ids_through_stop) for req in reqs] == expected
    before = 0  # requests of the step before
    for planned, count in seen:
        assert planned == (count == before)
        before = count
    assert sum(planned for planned, _ in seen) > len(seen) / 2


def test_a_prefill_forgets_the_plan(engine: InProcess) -> None:
    """The draft of a prefill overwrites the buffers of the plan."""
    engine.add(prompt(1, 12), max_new_tokens=40, ignore_eos=True)
    for _ in range(3):
        engine.step()
    assert engine.worker.verifier._planned is not None
    engine.add(prompt(2, 12), max_new_tokens=40, ignore_eos=True)
    engine.step()
    assert engine.worker.verifier._planned is None
