"""Hybrid targets: sessions, requests that wait, and two ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.managers.io_struct import OpenSessionReqInput, SessionParams
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_dflash.targets import hybrid as hybrid_targets
from sglang_dflash.tools.launch import free_port
from test.checkpoints import draft_config, draft_weights, prompt, write_draft
from test.inprocess import InProcess
from test.ranks import on_two_ranks
from test.targets import write
from test.worker.conftest import force

Turns = list[list[int]]
LENGTHS = (9, 14, 7)  # of the answers of a session


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    write(folder / "target", "Qwen3NextForCausalLM")
    config = draft_config()
    write_draft(folder / "draft", config, draft_weights(config))
    return folder


def serve(hybrid: Path, draft: bool = True, **flags: Any) -> InProcess:
    return InProcess(str(hybrid / "target"), str(hybrid / "draft") if draft else None, **flags)


def any_accepted(engine: InProcess, seed: int = 3) -> Any:
    rng = random.Random(seed)
    return force(engine, lambda _: rng.randint(0, 7))


def talk(engine: InProcess, streaming: bool, truth: Turns | None) -> tuple[Turns, list[int]]:
    """A session of three turns. Returns the answers, and how many tokens each turn reuses.

    With `truth`, drafts are right or wrong at random, also behind the end of an answer.
    """
    opened = OpenSessionReqInput(capacity_of_str_len=1000, session_id="one", streaming=streaming)
    engine.scheduler.open_session(opened)
    forced = None if truth is None else any_accepted(engine)
    before, said, reused = None, [], []
    for turn, length in enumerate(LENGTHS):
        session = SessionParams(id="one", rid=None if streaming else before)
        ids = prompt(60 + turn, 15)
        req = engine.add(ids, session_params=session, max_new_tokens=length, ignore_eos=True)
        if forced is not None and truth is not None:
            forced.truth[req.rid] = truth[turn] + [0] * 8
        engine.run(req)
        assert req.finished_reason.to_json()["type"] == "length", req.finished_reason.to_json()
        before = req.rid
        said.append(list(req.output_ids_through_stop))
        reused.append(req.cached_tokens)
    return said, reused


@pytest.fixture(scope="module")
def said(hybrid: Path) -> Turns:
    """The same turns without speculation, each prompt whole."""
    ids: list[int] = []
    answers = []
    with serve(hybrid, draft=False, disable_radix_cache=True) as engine:
        for turn, length in enumerate(LENGTHS):
            ids = ids + prompt(60 + turn, 15)
            answers.append(engine.generate(ids, max_new_tokens=length, ignore_eos=True))
            ids = ids + answers[-1]
    return answers


@pytest.mark.parametrize("radix", [True, False])
def test_session(hybrid: Path, said: Turns, radix: bool) -> None:
    """With the radix cache, a turn continues from the state behind the answer before."""
    with serve(hybrid, disable_radix_cache=not radix) as engine:
        answers, reused = talk(engine, streaming=False, truth=said)
    assert answers == said
    assert reused == ([0, 15 + 9 - 1, 30 + 23 - 1] if radix else [0] * 3)


def test_streaming_session(hybrid: Path, said: Turns) -> None:
    """A session that keeps its KV and its state between turns."""
    with serve(hybrid, enable_streaming_session=True) as engine:
        answers, reused = talk(engine, streaming=True, truth=said)
    assert answers == said
    assert all(reused[1:]), reused


SHARED = prompt(75, 20)
N = {"max_new_tokens": 24, "ignore_eos": True}
WAITS = SHARED + prompt(76, 60)


def answer_behind_an_evicted_state(hybrid: Path) -> list[int]:
    """A request matches a state, waits for memory, and the state is evicted meanwhile."""
    with serve(hybrid, max_total_tokens=256, max_mamba_cache_size=16) as engine:
        engine.generate(SHARED, max_new_tokens=1)
        running = engine.add(prompt(77, 150), max_new_tokens=60, ignore_eos=True)
        engine.step()
        waiting = engine.add(WAITS, **N)
        engine.step()
        assert waiting in engine.scheduler.waiting_queue
        place, pool = int(waiting.mamba_cow_src_index), engine.rows.mamba_pool.mamba_cache
        engine.scheduler.tree_cache.evict(EvictParams(num_tokens=0, mamba_num=16))
        assert place in engine.rows.mamba_allocator.free_slots
        pool.temporal[:, place] = 3.0  # what others leave there
        engine.run(running, waiting)
        assert waiting.cached_tokens == 0
        return list(waiting.output_ids)


def test_a_match_that_is_evicted_while_its_request_waits(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(hybrid, draft=False, disable_radix_cache=True) as engine:
        expected = engine.generate(WAITS, **N)
    assert answer_behind_an_evicted_state(hybrid) == expected
    monkeypatch.setattr(hybrid_targets, "forget_old_match", lambda *_: None)  # a mutation
    assert answer_behind_an_evicted_state(hybrid) != expected


def talk_of_rank(rank: int, folder: str, port: int, radix: bool, truth: Turns) -> Turns:
    """The answers of one of two ranks in a session. Both have drafts that are right or wrong."""
    flags: dict[str, Any] = {"tp_size": 2, "tp_rank": rank, "nccl_port": port}
    flags["disable_radix_cache"] = not radix
    with serve(Path(folder), **flags) as engine:
        return talk(engine, streaming=False, truth=truth)[0]


@pytest.mark.full
@pytest.mark.parametrize("radix", [True, False])
def test_two_ranks(hybrid: Path, said: Turns, radix: bool) -> None:
    """Each rank keeps the states of its own heads, behind the same accepted tokens."""
    found = on_two_ranks(talk_of_rank, str(hybrid), free_port(), radix, said)
    assert found == (said, said)
