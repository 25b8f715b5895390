"""Prefill and decode on servers of their own: the answers, and the accept length, of one."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from sglang_dflash.tiny.prompts import held_out
from test.differential.ask import compare
from test.fleet import PATIENCE, Pair, is_served_apart, prefill_and_decode
from test.servers import ALL_FEATURES, FULL, Client, chat, running

pytestmark = pytest.mark.ci
COMMON = (*ALL_FEATURES, *FULL, "--page-size", "4")
CHUNKS = ("--chunked-prefill-size", "32")
RADIX = ("--disaggregation-decode-enable-radix-cache",)
PROMPTS = [chat(example.prompt) for example in held_out("word", 6, seed=51)]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with prefill_and_decode(*COMMON, prefill=CHUNKS, decode=RADIX, environment=PATIENCE) as servers:
        yield servers


@pytest.fixture(scope="module")
def one() -> Iterator[Client]:
    with running(*COMMON, dflash=True) as server:
        yield server


@pytest.fixture(scope="module")
def router(pair: Pair) -> Iterator[str]:
    with pair.routed() as url:
        yield url


def test_random_requests(router: str, reference: Client) -> None:
    report = compare(51, range(42), reference.url, router, wanted=is_served_apart)
    assert report.compared > 15
    assert not report.differing, [(r.number, r.features, why) for r, why in report.differing]


def test_each_step_is_that_of_one_server(pair: Pair, one: Client) -> None:
    """Drafts and accept lengths, from the first step on, also with a cached prefix."""
    sampling = {"temperature": 0, "max_new_tokens": 60, "custom_params": {"spec_steps": True}}
    for _ in "new", "cached":
        for prompt in PROMPTS:
            body = {"text": prompt, "sampling_params": sampling, "return_logprob": True}
            apart, together = pair.ask(body).json(), one.post("/generate", body).json()
            assert apart["output_ids"] == together["output_ids"]
            assert _steps(apart) == _steps(together)
    assert apart["meta_info"]["cached_tokens"] > 20
    pair.flush()


def _steps(answer: dict[str, Any]) -> list[tuple[list[int], int]]:
    return [(step["drafts"], step["num_accepted"]) for step in answer["meta_info"]["spec_steps"]]


@pytest.mark.parametrize(
    "refused",
    [
        {"sampling_params": {"n": 2}},
        {"return_hidden_states": True},
        {"return_logprob": True, "token_ids_logprob": [5]},
        {"return_logprob": True, "logprob_start_len": 0},
    ],
    ids=lambda body: next(iter(body)),
)
def test_what_one_server_can_answer_alone(router: str, refused: dict[str, Any]) -> None:
    answer = requests.post(f"{router}/generate", json={"text": "def main("} | refused, timeout=120)
    assert answer.status_code == 400
    assert "prefill" in answer.text


def test_a_refused_request_leaves_nothing(pair: Pair) -> None:
    """One that only the scheduler refuses ends on both servers."""
    wrong = {"input_ids": [5, 10**6], "sampling_params": {"max_new_tokens": 4}}
    answer = pair.ask(wrong)
    assert answer.status_code == 400
    assert "outside the vocabulary" in answer.text
    pair.flush()


def test_a_decode_server_cannot_prefill_again(pair: Pair) -> None:
    """What it would retract."""
    refused = pair.decode.post("/pause_generation", {"mode": "retract"})
    assert refused.status_code == 400
    assert "retract" in refused.text
    assert pair.generate(PROMPTS[0])["output_ids"]


def test_aborts(pair: Pair, one: Client) -> None:
    """At any time, on one server or on both. A half that is alone is given up in time."""
    rng = random.Random(53)
    sampling = {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True}
    known = [one.generate(prompt, **sampling)["output_ids"] for prompt in PROMPTS]

    def ask(number: int) -> dict[str, Any]:
        prompt, rid = PROMPTS[number % len(PROMPTS)], f"aborted-{number}"
        servers = rng.choice([[pair.prefill], [pair.decode], [pair.prefill, pair.decode]])
        timer = threading.Timer(rng.choice([0, 0.05, 0.2, 1]), abort, (rid, servers))
        timer.start()
        body = {"text": prompt, "sampling_params": sampling, "rid": rid}
        answer: dict[str, Any] = pair.ask(body, seconds=300).json()
        timer.join()
        return answer

    def abort(rid: str, servers: list[Client]) -> None:
        for server in servers:
            assert server.post("/abort_request", {"rid": rid}).status_code == 200

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(ask, range(32)))
    for number, answer in enumerate(answers):
        if "output_ids" not in answer:
            assert re.search("Aborted by AbortReq|timed out|timeout", answer["message"]), answer
        else:
            given = answer["output_ids"]
            assert given == known[number % len(PROMPTS)][: len(given)]
    pair.flush()
    assert pair.generate(PROMPTS[0], **sampling)["output_ids"] == known[0]
