"""HTTP from other processes than the main one: two tokenizer workers, or HTTP/2."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import requests

from sglang_dflash.tiny.prompts import held_out
from sglang_dflash.tools.launch import START_SECONDS
from sglang_dflash.watch.page import PAGE
from test.server.fuzzing import fuzz
from test.server.test_api import scraped, total
from test.servers import Client, chat, running

PROMPTS = [chat(example.prompt) for example in held_out("word", 6, seed=51)]
WORKERS = ("--tokenizer-worker-num", "2")
WAYS = {
    "HTTP/1.1": WORKERS,
    "HTTP/2": ("--enable-http2",),
    "two detokenizers": (*WORKERS, "--detokenizer-worker-num", "2"),
}
TRIES = 6  # both workers get some

pytestmark = pytest.mark.ci


# The plain one is a part of that with two detokenizers.
@pytest.fixture(
    scope="module",
    params=[pytest.param("HTTP/1.1", marks=pytest.mark.full), "HTTP/2", "two detokenizers"],
)
def server(request: pytest.FixtureRequest) -> Iterator[Client]:
    few = "--max-running-requests", "4"  # so that others wait
    flags = *WAYS[request.param], *few, "--enable-metrics"
    with running(*flags, dflash=True) as client:
        yield client


@pytest.fixture
def http(server: Client) -> Iterator[httpx.Client]:
    """A client that speaks one of the two versions alone."""
    two = server.flags[0] == "--enable-http2"
    with httpx.Client(base_url=server.url, http1=not two, http2=two, timeout=60) as client:
        assert client.get("/health").http_version == ("HTTP/2" if two else "HTTP/1.1")
        yield client


def warmed_up(server: Client) -> None:
    """Wait until each process has had its own first request from SGLang, which has verify steps.

    A server is ready when its first process is. With HTTP/2 there is one, which logs nothing.
    """
    processes = 2 if set(WORKERS) <= set(server.flags) else 0
    deadline = time.monotonic() + START_SECONDS
    while server.server.log.read_text().count("ready to roll") < processes:
        assert time.monotonic() < deadline, server.server.tail()
        time.sleep(0.2)


def test_equals_the_target(server: Client, reference: Client, http: httpx.Client) -> None:
    """SGLang's own DFLASH would count no verify steps."""
    warmed_up(server)
    before, steps = total(scraped(server), "spec_verify_steps_total"), 0
    for prompt in PROMPTS:
        body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 64}}
        answer = http.post("/generate", json=body).json()
        assert answer["output_ids"] == reference.generate(prompt)["output_ids"]
        steps += answer["meta_info"]["spec_verify_ct"]
    assert total(scraped(server), "spec_verify_steps_total") - before == steps
    info = http.get("/server_info").json()
    assert info["sglang_dflash"]["verify_width"] == "auto"


def test_many_at_once(server: Client, reference: Client) -> None:
    """SGLang divides a batch's answers among processes by each field's own rule."""
    asked = {"return_logprob": True, "top_logprobs_num": 2, "max_new_tokens": 40}
    answers = server.generate_many(PROMPTS * 2, **asked)
    for prompt, answer in zip(PROMPTS * 2, answers, strict=True):
        alone = reference.generate(prompt, **asked)
        assert answer["output_ids"] == alone["output_ids"]
        assert answer["text"] == alone["text"]
        meta = answer["meta_info"]
        chosen = [token for _, token, _ in meta["output_token_logprobs"]]
        assert chosen == answer["output_ids"]
        assert sum(meta["spec_accepted_per_position"]) == meta["spec_num_correct_drafts"]


def test_every_process_checks(http: httpx.Client) -> None:
    bodies: list[tuple[str, dict[str, Any], str]] = [
        ("/generate", {"text": "x", "sampling_params": {"stop": 1}}, "stop"),
        ("/generate", {"text": "x", "token_ids_logprob": [[1]]}, "token_ids_logprob"),
        ("/generate", {"input_ids": [5] * 40_000}, "longer than"),
        ("/start_profile", {"activities": ["x"]}, "activities"),
        ("/api/chat", {"model": "x", "messages": []}, "messages"),
        ("/v1/completions", {"model": "x", "prompt": ["x"], "extra_key": ["x"]}, "extra_key"),
    ]
    for path, body, named in bodies * TRIES:
        answer = http.post(path, json=body)
        assert answer.status_code == 400, answer.text
        assert named in answer.text


def test_every_process_shows_steps(http: httpx.Client) -> None:
    params = {"max_new_tokens": 16, "temperature": 0, "custom_params": {"spec_steps": True}}
    for _ in range(TRIES):
        assert "sglang-dflash" in http.get(PAGE).text
        body = {"text": PROMPTS[0], "return_logprob": True, "sampling_params": params}
        meta = http.post("/generate", json=body).json()["meta_info"]
        assert len(meta["spec_steps"]) == meta["spec_verify_ct"] > 0


def test_a_request_that_the_queue_drops_is_answered(server: Client) -> None:
    long = [server.stream("def f(", max_new_tokens=4_000, ignore_eos=True) for _ in range(4)]
    for answers in long:
        next(answers)
    body = {"rid": "waits", "text": "x"}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(requests.post, f"{server.url}/generate", json=body, timeout=60)
        while not waiting.done():
            server.post("/abort_request", {"rid": "waits"})
            time.sleep(0.2)
    assert waiting.result().json()["meta_info"]["finish_reason"]["type"] == "abort"
    for answers in long:
        answers.close()  # type: ignore[attr-defined]
    server.flush()


def test_no_request_is_an_error_of_the_server(server: Client) -> None:
    fuzz(server, 100)
