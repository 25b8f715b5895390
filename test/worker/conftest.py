from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from transformers import Qwen3ForCausalLM

from sglang_dflash.settings.options import VERIFY_WIDTH
from test.checkpoints import VOCAB
from test.cuts import verify_any_rows
from test.forced import Forced, put_drafter
from test.inprocess import InProcess

Request: TypeAlias = tuple[list[int], dict[str, Any]]  # prompt and options
Alone: TypeAlias = Callable[..., list[dict[str, Any]]]  # the fixture of that name
Cut: TypeAlias = Callable[[InProcess], None]  # the fixtures `cuts` and `cut_apart`


@pytest.fixture(scope="session")
def target(small: Path) -> str:
    return str(small / "target")


@pytest.fixture(scope="session")
def draft(small: Path) -> str:
    return str(small / "draft")


@pytest.fixture(scope="session")
def alone(target: str) -> Alone:
    """The small target's answers: `each_alone` of it."""
    return partial(each_alone, target)


@pytest.fixture(scope="session")
def model(target: str) -> Qwen3ForCausalLM:
    """Transformers' model of the target."""
    return Qwen3ForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


def facts(req: Any) -> dict[str, Any]:
    """What a client can see of a finished request."""
    return {
        "ids": list(req.output_ids_through_stop),
        "reason": req.finished_reason.to_json(),
        "logprobs": req.logprob.output_token_logprobs_val if req.return_logprob else None,
        "logprob_ids": req.logprob.output_token_logprobs_idx if req.return_logprob else None,
    }


ANSWERS: dict[str, dict[str, Any]] = {}  # of this process, by all that decides on them


def each_alone(target: str, asked: list[Request], **flags: Any) -> list[dict[str, Any]]:
    """A target's answers to requests, without speculation, to one request at a time; remembered."""
    keys = [repr((target, request, flags)) for request in asked]
    new = [pair for pair in zip(keys, asked, strict=True) if pair[0] not in ANSWERS]
    if new:
        with InProcess(target, disable_radix_cache=True, **flags) as engine:
            for key, (ids, options) in new:
                req = engine.add(ids, **copy.deepcopy(options))  # a processor writes into them
                engine.run(req)
                ANSWERS[key] = facts(req)
    return [ANSWERS[key] for key in keys]


def join(
    engine: InProcess, asked: list[Request], answers: list[dict[str, Any]], steps: int = 1
) -> list[Any]:
    """Serve requests that join one after another. Any number of their drafts is right."""
    rng, reqs = random.Random(2), []
    forced = force(engine, lambda _: rng.randint(0, 7))
    for (ids, options), answer in zip(asked, answers, strict=True):
        reqs.append(engine.add(ids, **options))
        forced.truth[reqs[-1].rid] = answer["ids"]
        for _ in range(steps):
            engine.step()
    engine.run(*reqs)
    return reqs


def force(engine: InProcess, accept: Callable[[Any], int]) -> Forced:
    """Put a forced drafter into a running engine."""
    forced = Forced(engine.worker.drafter, accept, vocab_size=VOCAB)
    put_drafter(engine.worker, forced)
    return forced


@pytest.fixture
def cut_apart(monkeypatch: pytest.MonkeyPatch) -> Callable[[InProcess], None]:
    """Makes an engine verify any part of each block, all alike where it serves no ragged ones."""
    monkeypatch.setenv(VERIFY_WIDTH, "auto")

    def cut_some(engine: InProcess) -> None:
        verify_any_rows(engine.worker)

    return cut_some


@pytest.fixture(params=[pytest.param("full", marks=pytest.mark.ci), "cut"])
def cuts(request: pytest.FixtureRequest) -> Callable[[InProcess], None]:
    """Whole blocks, then any parts of them."""
    if request.param == "full":
        return lambda _: None
    cut: Cut = request.getfixturevalue("cut_apart")
    return cut
