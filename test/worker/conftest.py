from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from sglang_dflash.options import VERIFY_WIDTH
from sglang_dflash.runtime.block import DFlashBlock
from sglang_dflash.runtime.verify_width import Weighed
from test.checkpoints import VOCAB
from test.forced import Forced, put_drafter
from test.inprocess import InProcess

Request: TypeAlias = tuple[list[int], dict[str, Any]]  # prompt and options
Alone: TypeAlias = Callable[[list[Request]], list[dict[str, Any]]]  # the fixture of that name
Cut: TypeAlias = Callable[[InProcess], None]  # the fixtures `cuts` and `cut_apart`


def prompt(seed: int, length: int) -> list[int]:
    """Random token ids that are neither EOS nor the mask."""
    return random.Random(seed).choices(range(5, 140), k=length)


@pytest.fixture(scope="session")
def target(small: Path) -> str:
    return str(small / "target")


@pytest.fixture(scope="session")
def draft(small: Path) -> str:
    return str(small / "draft")


@pytest.fixture(scope="session")
def alone(target: str) -> Alone:
    """What the target says to one request without speculation, remembered."""
    known: dict[str, dict[str, Any]] = {}

    def answers(requests: list[tuple[list[int], dict[str, Any]]]) -> list[dict[str, Any]]:
        missing = [r for r in requests if repr(r) not in known]
        if missing:
            with InProcess(target, disable_radix_cache=True) as engine:
                for ids, options in missing:
                    req = engine.add(ids, **options)
                    engine.run(req)
                    known[repr((ids, options))] = facts(req)
        return [known[repr(r)] for r in requests]

    return answers


def facts(req: Any) -> dict[str, Any]:
    """What a client can see of a finished request."""
    return {
        "ids": list(req.output_ids_through_stop),
        "reason": req.finished_reason.to_json(),
        "logprobs": req.logprob.output_token_logprobs_val if req.return_logprob else None,
        "logprob_ids": req.logprob.output_token_logprobs_idx if req.return_logprob else None,
    }


def force(engine: InProcess, accept: Callable[[Any], int]) -> Forced:
    """Put a forced drafter into a running engine."""
    forced = Forced(engine.worker.drafter, accept, vocab_size=VOCAB)
    put_drafter(engine.worker, forced)
    return forced


def without_graphs(engine: InProcess) -> None:
    """Run every forward in its modules, so that what a test puts into them is called."""
    for runner in (engine.worker.model_runner, engine.worker.draft_model_runner):
        runner.piecewise_cuda_graph_runner = None


def verify_parts(engine: InProcess, part: Callable[[DFlashBlock], DFlashBlock]) -> None:
    """Verify this part of every block, whatever pays; the policy learns from it all the same."""
    policy = engine.worker.verify_width

    def choose(block: DFlashBlock) -> Weighed:
        assert block.probabilities is not None
        verified, probabilities = part(block), block.probabilities.cpu().numpy()
        return Weighed(verified, probabilities, np.array(verified.lens), policy._survival)

    policy.choose, policy.verifies_whole = choose, lambda _: False


@pytest.fixture
def cut_apart(monkeypatch: pytest.MonkeyPatch) -> Callable[[InProcess], None]:
    """Makes an engine verify, of each request, any part of its block."""
    monkeypatch.setenv(VERIFY_WIDTH, "auto")
    rng = random.Random(8)

    def some(block: DFlashBlock) -> DFlashBlock:
        return block.cut(np.array([rng.randint(1, block.draft_token_num) for _ in block.slots]))

    return lambda engine: verify_parts(engine, some)


@pytest.fixture(params=["full", "cut"])
def cuts(request: pytest.FixtureRequest) -> Callable[[InProcess], None]:
    """Whole blocks, then any parts of them."""
    if request.param == "full":
        return lambda _: None
    cut: Cut = request.getfixturevalue("cut_apart")
    return cut
