"""What bends logits or ends text: with any acceptance, the answer is that of one-token decoding."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from sglang.srt.sampling.custom_logit_processor import (
    CustomLogitProcessor,
    DisallowedTokensLogitsProcessor,
)

from test.checkpoints import prompt
from test.inprocess import InProcess
from test.precision import HIDDEN_STATE_BOUND, LOGPROB_BOUND
from test.worker.conftest import Alone, Cut, facts, force, join

N: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": 0}

REQUESTS: dict[str, dict[str, Any]] = {
    "plain": N,
    "frequency": N | {"frequency_penalty": 0.9},
    "presence": N | {"presence_penalty": 1.5},
    "repetition": N | {"repetition_penalty": 1.8},
    "negative": N | {"presence_penalty": -0.7, "frequency_penalty": -0.2},
    "bias": N | {"logit_bias": {"17": 4.0, "60": -5.0, "61": 3.5}},
    "min_new_tokens": {
        "max_new_tokens": 40,
        "min_new_tokens": 12,
        "stop_token_ids": list(range(5, 90)),
    },
    "logprobs": N | LOGPROBS,
    "top": N | {"return_logprob": True, "top_logprobs_num": 5},
    "token_ids": N | {"return_logprob": True, "token_ids_logprob": [7, 9, 150]},
    "penalised logprobs": N | LOGPROBS | {"frequency_penalty": 0.5, "logit_bias": {"30": 2.0}},
}


def known(req: Any) -> dict[str, Any]:
    """Every number a client sees."""
    out = req.logprob
    return facts(req) | (
        {
            "top_val": out.output_top_logprobs_val,
            "top_idx": out.output_top_logprobs_idx,
            "ids_val": out.output_token_ids_logprobs_val,
            "ids_idx": out.output_token_ids_logprobs_idx,
            "input": out.input_token_logprobs_val,
        }
        if req.return_logprob
        else {}
    )


def close(got: Any, expected: Any) -> bool:
    """Equal, numbers within the bound of a logprob."""
    if isinstance(expected, float):
        return bool(abs(got - expected) <= LOGPROB_BOUND)
    if isinstance(expected, list | tuple):
        return len(got) == len(expected) and all(map(close, got, expected))
    if isinstance(expected, dict):
        return got.keys() == expected.keys() and all(close(got[k], expected[k]) for k in expected)
    return bool(got == expected)


@pytest.fixture(scope="module")
def single(target: str) -> dict[str, dict[str, Any]]:
    """Each request alone, without speculation."""
    answers = {}
    with InProcess(target, disable_radix_cache=True, enable_custom_logit_processor=True) as engine:
        for i, (name, options) in enumerate(REQUESTS.items()):
            req = engine.add(prompt(200 + i, 15), **options)
            engine.run(req)
            answers[name] = known(req)
    return answers


@pytest.mark.parametrize("accepting", ["none", "all", "random"])
@pytest.mark.parametrize("page", [1, 16])
def test_all_together_equal_each_alone(
    target: str, draft: str, single: dict[str, dict[str, Any]], accepting: str, page: int, cuts: Cut
) -> None:
    """Penalties, bias, minimum length and logprobs, all in one batch."""
    rng = random.Random(9)
    count = {"none": lambda _: 0, "all": lambda _: 7, "random": lambda _: rng.randint(0, 7)}
    with InProcess(target, draft, page_size=page, max_running_requests=16) as engine:
        forced = force(engine, count[accepting])
        cuts(engine)
        reqs = {}
        for i, (name, options) in enumerate(REQUESTS.items()):
            req = reqs[name] = engine.add(prompt(200 + i, 15), **options)
            forced.truth[req.rid] = single[name]["ids"]
        engine.run(*reqs.values())
    for name, req in reqs.items():
        assert close(known(req), single[name]), name
        if accepting == "all" and name != "min_new_tokens":
            assert req.spec_verify_ct < len(req.output_ids)


@pytest.mark.parametrize("name", ["frequency", "presence", "repetition", "negative", "bias"])
def test_penalties_do_something(alone: Alone, name: str) -> None:
    """The control of the test above: with each, one prompt has another answer than without it."""
    plain, bent = alone([(prompt(200, 15), REQUESTS[asked]) for asked in ("plain", name)])
    assert bent["ids"] != plain["ids"]


def test_min_new_tokens_stops_when_it_may(target: str, draft: str, alone: Alone) -> None:
    """Min_new_tokens=4 with an end token due at token 6 stops at 6."""
    ids = prompt(230, 12)
    [free] = alone([(ids, N)])
    stop = free["ids"][5]
    assert free["ids"].index(stop) == 5
    options: dict[str, Any] = {
        "max_new_tokens": 40,
        "min_new_tokens": 4,
        "stop_token_ids": [stop],
    }
    [expected] = alone([(ids, options)])
    with InProcess(target, draft) as engine:
        forced = force(engine, lambda _: 7)
        req = engine.add(ids, **options)
        forced.truth[req.rid] = free["ids"]
        engine.run(req)
        assert facts(req) == expected
        assert len(req.output_ids) == 6


def test_penalties_survive_retraction(target: str, draft: str, alone: Alone) -> None:
    """All output so far counts, also after a retraction, where SGLang starts anew."""
    asked = [
        (prompt(240 + i, 30), N | {"max_new_tokens": 60, "frequency_penalty": 0.6})
        for i in range(6)
    ]
    expected = alone(asked)
    with InProcess(target, draft, max_total_tokens=320, schedule_conservativeness=0.01) as engine:
        forced = force(engine, lambda _: 2)
        reqs = [engine.add(ids, **options) for ids, options in asked]
        for req, answer in zip(reqs, expected, strict=True):
            forced.truth[req.rid] = answer["ids"]
        engine.run(*reqs)
        assert sum(req.retraction_count for req in reqs) > 0
        assert [facts(req) for req in reqs] == expected


class Ban(CustomLogitProcessor):
    """Bans a token; fails unless it sees the request's true history, one call a token."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]]
    ) -> torch.Tensor:
        for row, params in zip(logits, custom_param_list, strict=True):
            output = list(params["__req__"].output_ids)
            calls = params.setdefault("calls", [])
            assert calls == [output[:i] for i in range(len(output))], (
                "a call was left out or doubled"
            )
            calls.append(output)
            row[params["token"]] = -float("inf")
            if output and output[-1] % 2:
                row[params["token"] - 48] = -float("inf")
        return logits


def test_custom_processor_commits_one_token(target: str, draft: str) -> None:
    """A processor sees true history and is called once a token; other rows keep their width."""
    ids, other = prompt(250, 12), prompt(251, 12)
    flags: dict[str, Any] = {"enable_custom_logit_processor": True}

    def options() -> dict[str, Any]:
        return {
            "max_new_tokens": 20,
            "ignore_eos": True,
            "custom_params": {"token": 121},
            "custom_logit_processor": Ban.to_str(),
        }

    with InProcess(target, disable_radix_cache=True, **flags) as engine:
        expected = engine.generate(ids, **options())
        plain = engine.generate(other, **N)
        assert expected != engine.generate(ids, max_new_tokens=20, ignore_eos=True)
    with InProcess(target, draft, **flags) as engine:
        forced = force(engine, lambda _: 7)
        bent, free = engine.add(ids, **options()), engine.add(other, **N)
        forced.truth = {bent.rid: expected, free.rid: plain}
        engine.run(bent, free)
        assert list(bent.output_ids) == expected
        assert list(free.output_ids) == plain
        assert bent.spec_verify_ct == len(expected) - 1
        assert bent.spec_num_correct_drafts == 0
        assert free.spec_verify_ct == 5


SEEDED: list[dict[str, Any]] = [
    {"temperature": 1.0, "sampling_seed": 7},
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 20, "sampling_seed": 8},
    {"temperature": 1.2, "top_p": 0.8, "sampling_seed": 7},
    {"temperature": 1.0, "sampling_seed": 2**40 + 1},
    {"temperature": 1.5},
]


@pytest.mark.parametrize("width", [2, 5, 8])
def test_a_seed_decides_alone(target: str, draft: str, alone: Alone, width: int, cuts: Cut) -> None:
    """A seeded request gives the tokens it gives alone without speculation, in any company."""
    asked = [(prompt(260 + i, 10 + i), N | options) for i, options in enumerate(SEEDED)]
    flags: dict[str, Any] = {"enable_deterministic_inference": True}
    expected = alone(asked, **flags)
    with InProcess(target, draft, speculative_num_draft_tokens=width, **flags) as engine:
        cuts(engine)
        reqs = join(engine, asked, expected)
    assert [facts(req) for req in reqs] == expected


def test_seeded_min_p_is_refused(target: str, draft: str) -> None:
    """SGLang would die of an assertion: the request gets HTTP 400, the server goes on."""
    with InProcess(target, draft, enable_deterministic_inference=True) as engine:
        req = engine.add(prompt(1, 5), temperature=1.0, min_p=0.1)
        engine.run(req)
        reason = req.finished_reason.to_json()
        assert (reason["type"], reason["status_code"]) == ("abort", 400)
        assert "min_p" in reason["message"]
        assert len(engine.generate(prompt(1, 5), max_new_tokens=4, ignore_eos=True)) == 4


@pytest.mark.parametrize("with_first", [True, False])
def test_token_ids_logprob_beside_other_logprobs(target: str, draft: str, with_first: bool) -> None:
    """SGLang dies in prefill of a batch that mixes token_ids_logprob with other logprobs."""
    options: list[dict[str, Any]] = [{"token_ids_logprob": [1, 2]}, {"top_logprobs_num": 2}]
    with InProcess(target, draft) as engine:
        reqs = [
            engine.add(prompt(270 + i, 8), return_logprob=True, **N, **o)
            for i, o in enumerate(options if with_first else options[::-1])
        ]
        engine.run(*reqs)
        assert all(len(r.logprob.output_token_logprobs_val) == 40 for r in reqs)


def test_hidden_states(target: str, draft: str, alone: Alone, cuts: Cut) -> None:
    """return_hidden_states: the last layer's state of every token, as without speculation."""
    ids = prompt(280, 14)
    options = {"max_new_tokens": 20, "ignore_eos": True, "return_hidden_states": True}
    flags: dict[str, Any] = {"enable_return_hidden_states": True}
    with InProcess(target, disable_radix_cache=True, **flags) as engine:
        req = engine.add(ids, **options)
        engine.run(req)
        expected, truth = req.hidden_states, list(req.output_ids)
    for accept in (0, 7):
        with InProcess(target, draft, **flags) as engine:

            def right(_: Any, accept: int = accept) -> int:
                return accept

            forced = force(engine, right)
            cuts(engine)
            others = [engine.add(prompt(281 + i, 9), max_new_tokens=1) for i in range(2)]
            req = engine.add(ids, **options)
            forced.truth[req.rid] = truth
            engine.run(*others, req)
        assert len(req.hidden_states) == len(expected) == 20
        for got, want in zip(req.hidden_states, expected, strict=True):
            torch.testing.assert_close(
                torch.tensor(got), torch.tensor(want), atol=HIDDEN_STATE_BOUND, rtol=0
            )


class Raise(CustomLogitProcessor):
    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]]
    ) -> torch.Tensor:
        raise RuntimeError("no such thing")


class Narrow(CustomLogitProcessor):
    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]]
    ) -> torch.Tensor:
        return logits[:, :5]


def test_custom_processors_in_company(target: str, draft: str, alone: Alone, cuts: Cut) -> None:
    """Requests of one processor with unlike parameters go together; a broken one ends alone."""
    flags: dict[str, Any] = {"enable_custom_logit_processor": True, "max_running_requests": 8}
    bans = [{"token_ids": [token]} for token in (5, 121)]
    processor = DisallowedTokensLogitsProcessor.to_str()
    faulty: dict[str, type[CustomLogitProcessor]]
    faulty = {"no such thing": Raise, "shape (1, 5)": Narrow}

    def options(params: dict[str, Any]) -> dict[str, Any]:
        return N | {"custom_params": dict(params), "custom_logit_processor": processor}

    ids = [prompt(260 + i, 12) for i in range(3)]
    asked = [(i, options(ban)) for i, ban in zip(ids, bans, strict=False)]
    expected = [answer["ids"] for answer in alone(asked, **flags)]
    with InProcess(target, draft, **flags) as engine:
        cuts(engine)
        reqs = [engine.add(i, **given) for i, given in asked]
        broken = {
            words: engine.add(ids[2], **N, custom_logit_processor=processor.to_str())
            for words, processor in faulty.items()
        }
        engine.run(*reqs, *broken.values())
    assert [list(req.output_ids) for req in reqs] == expected
    for words, req in broken.items():
        reason = req.finished_reason.to_json()
        assert reason["status_code"] == 400
        assert words in reason["message"]
