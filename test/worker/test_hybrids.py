"""Hybrid targets: their recurrent states are those of the committed tokens, no more no less."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from sglang.srt.configs.mamba_utils import (
    Mamba2CacheParams,
    Mamba2StateDType,
    Mamba2StateShape,
)

from sglang_dflash.settings.options import DRAFT_AHEAD, VERIFY_WIDTH
from sglang_dflash.targets.hybrid import bytes_of_inputs
from test.checkpoints import draft_config, draft_weights, prompt, write_draft
from test.inprocess import InProcess
from test.rehearsal.mutation import mutate
from test.targets import write
from test.worker.conftest import Cut, Request, each_alone, facts, force, join

LONG = {"max_new_tokens": 40, "ignore_eos": True}
NEXT, WITH_IMAGES = "Qwen3NextForCausalLM", "Qwen3_5ForConditionalGeneration"


@dataclass
class Pair:
    target: str
    draft: str
    asked: list[Request]
    answers: list[dict[str, Any]]  # without speculation, alone

    def serve(self, **flags: Any) -> InProcess:
        return InProcess(self.target, self.draft, **flags)


@pytest.fixture(scope="module", params=[NEXT, pytest.param(WITH_IMAGES, marks=pytest.mark.full)])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("hybrid")
    write(folder / "target", request.param)
    config = draft_config()
    draft = write_draft(folder / "draft", config, draft_weights(config))
    asked = [(prompt(30 + i, 1 + 9 * i), LONG) for i in range(6)]
    answers = each_alone(str(folder / "target"), asked)
    return Pair(str(folder / "target"), str(draft), asked, answers)


@pytest.fixture(params=["on", pytest.param("off", marks=pytest.mark.full)])
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DRAFT_AHEAD, request.param)


def served(engine: InProcess, pair: Pair) -> list[dict[str, Any]]:
    """The answers to all requests at once, with any number of accepted drafts."""
    return [facts(req) for req in join(engine, pair.asked, pair.answers)]


FLAGS: list[dict[str, Any]] = [
    {"disable_radix_cache": True},
    {"disable_radix_cache": True, "page_size": 16, "chunked_prefill_size": 16},
    {"chunked_prefill_size": 8},
    {"speculative_num_draft_tokens": 3},
]


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_equals_target(pair: Pair, ahead: None, cuts: Cut, flags: dict[str, Any]) -> None:
    """Requests join one after another. Blocks are verified whole, or any part of each."""
    with pair.serve(**flags) as engine:
        cuts(engine)
        slots = engine.rows.mamba_allocator
        free = slots.available_size()
        assert served(engine, pair) == pair.answers
        engine.scheduler.flush_cache()
        assert slots.available_size() == free


def test_retraction(pair: Pair, ahead: None) -> None:
    """A request that runs out of memory is prefilled again, with its state."""
    flags = {"max_total_tokens": 224, "schedule_conservativeness": 0.01}
    with pair.serve(**flags) as engine:
        retract = engine.scheduler.update_running_batch
        retracted: list[Any] = []

        def watched(batch: Any) -> Any:
            kept = retract(batch)
            retracted.extend(req for req in engine.scheduler.waiting_queue if req.retraction_count)
            return kept

        engine.scheduler.update_running_batch = watched
        assert served(engine, pair) == pair.answers
        assert retracted


def test_abort(pair: Pair, ahead: None) -> None:
    """The slot of an aborted request goes to the next one, which begins with an empty state."""
    with pair.serve(disable_radix_cache=True, max_running_requests=2) as engine:
        for _ in range(3):
            lost = engine.add(prompt(70, 30), **LONG)
            for _ in range(4):
                engine.step()
            engine.abort(lost)
            ids, options = pair.asked[1]
            req = engine.add(ids, **options)
            engine.run(req)
            assert facts(req) == pair.answers[1]


Turns = dict[tuple[int, int], list[int]]  # the answer to each turn of each conversation


def converse(engine: InProcess, truth: Turns | None) -> tuple[Turns, bool]:
    """Six conversations of two turns. Returns the answers, and whether all second turns hit."""
    rng, answers, hit = random.Random(4), {}, True
    forced = None if truth is None else force(engine, lambda _: rng.randint(0, 7))
    for i in range(6):
        asked, known = prompt(80 + i, 20 + 7 * i), 0
        for turn, length in enumerate((7 + i, 12)):
            req = engine.add(asked, max_new_tokens=length, ignore_eos=True)
            if (
                forced is not None and truth is not None
            ):  # a first turn ends inside its accepted drafts
                forced.truth[req.rid] = truth[i, turn] + [0] * 8
            engine.run(req)
            hit &= req.cached_tokens == known
            answers[i, turn] = list(req.output_ids)
            known = len(asked) + length - 1
            asked = asked + list(req.output_ids) + prompt(90, 4)
    return answers, hit


@pytest.fixture(scope="module")
def turns(pair: Pair) -> Turns:
    with InProcess(pair.target, disable_radix_cache=True) as engine:
        return converse(engine, None)[0]


def second_turns(pair: Pair, turns: Turns) -> bool:
    """Whether all turns are right. A second one is served from the state of the first."""
    with pair.serve() as engine:
        answers, hit = converse(engine, turns)
    assert hit
    return answers == turns


def test_second_turns(pair: Pair, turns: Turns, ahead: None) -> None:
    """The radix cache takes over the state of a request that ended at any block position."""
    assert second_turns(pair, turns)


def test_equal_prompts_share_a_state(pair: Pair) -> None:
    """Requests that run at once continue from one stored state, and none changes it."""
    ids, options = pair.asked[4]
    with pair.serve() as engine:
        engine.run(engine.add(ids[:20], max_new_tokens=1))
        reqs = [engine.add(ids, **options) for _ in range(3)]
        engine.run(*reqs)
        assert all(facts(req) == pair.answers[4] for req in reqs)
        assert [req.cached_tokens for req in reqs] == [20] * 3


COUNT = "[len(ids) for ids in tokens]"
REPLAY = "self._replay("
MUTATIONS = {
    "none": ("targets.recurrent_states:RecurrentStates.commit", REPLAY, "(lambda *_: None)("),
    "all accepted": (
        "step.commit:Committer._commit",
        COUNT,
        "(outcome.num_accepted + 1).tolist()",
    ),
    "one of each": ("step.commit:Committer._commit", COUNT, "[1] * len(tokens)"),
}


@pytest.mark.ci
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_tokens_that_are_not_replayed_are_seen(
    pair: Pair, turns: Turns, monkeypatch: pytest.MonkeyPatch, mutation: str
) -> None:
    """Mutations: the states behind other tokens than those that a request took."""
    mutate(monkeypatch, *MUTATIONS[mutation])
    assert not second_turns(pair, turns)


@pytest.mark.ci
def test_work_of_a_prefill_that_is_repeated_is_seen(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutation: a verify gets what its batch had to do as a prefill."""
    monkeypatch.setattr("sglang_dflash.step.verify.PREFILL_ONLY_FIELDS", {})
    with pair.serve(disable_radix_cache=True) as engine:
        assert served(engine, pair) != pair.answers


@pytest.mark.parametrize(("heads", "layers"), [(32, 36), (48, 48)])  # Qwen3-Next, Qwen3.6 27B
def test_a_block_takes_little_memory(heads: int, layers: int) -> None:
    """At a block of 16, at most 0.15 of a state. SGLang's states of positions take 16."""
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=128 * heads,
        n_groups=16,
        num_heads=heads,
        head_dim=128,
        state_size=128,
        conv_kernel=4,
    )
    dtypes = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
    params = Mamba2CacheParams(shape=shape, layers=list(range(layers)), dtype=dtypes)
    assert bytes_of_inputs(params, 16) <= 0.15 * params.mamba_cache_per_req


@pytest.mark.parametrize(("given", "requests"), [(4, 4), (None, 48)])
def test_requests_of_a_replica(pair: Pair, given: int | None, requests: int) -> None:
    """SGLang's bound is that of each replica, and so are the states."""
    with pair.serve(disable_radix_cache=True, dp_size=2, max_running_requests=given) as engine:
        runner = engine.worker.model_runner
        assert runner.max_running_requests == runner.server_args.max_mamba_cache_size == requests


def test_width_auto(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A width of its own per request, or one per batch for a target with 3-D positions."""
    monkeypatch.setenv(VERIFY_WIDTH, "auto")
    with pair.serve(max_mamba_cache_size=9) as engine:  # three requests, fewer than the flag says
        assert engine.worker.model_runner.max_running_requests == 3
        assert engine.worker.graphs.ragged != engine.worker.model_runner.model_is_mrope
        assert served(engine, pair) == pair.answers
