"""Token for token the target's own answers, over HTTP, in rotated configurations."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any, TypeAlias

import pytest
import requests

from sglang_dflash.tiny import TARGET
from sglang_dflash.tiny.prompts import held_out
from test.server.conftest import FULL, Client, chat, running

CONFIGURATIONS = {
    "page1": [],
    "page16-chunk32": ["--page-size", "16", "--chunked-prefill-size", "32"],
    "page256-noradix": ["--page-size", "256", "--disable-radix-cache"],
    "chunk4": ["--chunked-prefill-size", "4"],
    "tp2": ["--tp", "2"],
}


IN_CI = ("page16-chunk32", "page256-noradix", "tp2")
Mixed: TypeAlias = list[tuple[str, dict[str, Any]]]  # prompts and the target's answers


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in IN_CI else pytest.mark.full)
        for name in CONFIGURATIONS
    ],
    ids=str,
)
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, Client]]:
    with running(*CONFIGURATIONS[request.param], *FULL, dflash=True) as client:
        yield request.param, client


def mixed_prompts() -> list[str]:
    """32 prompts from a few to some hundred tokens."""
    rng = random.Random(11)
    kinds = {kind: held_out(kind, 12, seed=5) for kind in ("word", "json", "code")}
    prompts = [chat(e.prompt) for e in kinds["word"] + kinds["json"]]
    prompts += [e.prompt[: rng.randint(10, 400)] for e in kinds["code"]]
    rng.shuffle(prompts)
    return prompts[:32]


@pytest.fixture(scope="session")
def mixed(reference: Client) -> Mixed:
    return [(prompt, reference.generate(prompt, max_new_tokens=96)) for prompt in mixed_prompts()]


def visible(answer: dict[str, Any]) -> tuple[Any, ...]:
    meta = answer["meta_info"]
    return (
        answer["text"],
        answer["output_ids"],
        meta["finish_reason"],
        meta["prompt_tokens"],
        meta["completion_tokens"],
    )


def test_concurrent_requests_equal_the_target(server: tuple[str, Client], mixed: Mixed) -> None:
    _, client = server
    answers = client.generate_many([prompt for prompt, _ in mixed], max_new_tokens=96)
    for answer, (_, expected) in zip(answers, mixed, strict=True):
        assert visible(answer) == visible(expected)
    steps = sum(a["meta_info"]["spec_verify_ct"] for a in answers)
    accepted = sum(a["meta_info"]["spec_num_correct_drafts"] for a in answers)
    assert (accepted + steps) / steps > 2, "acceptance collapsed"
    client.flush()


def trace(answer: dict[str, Any]) -> tuple[Any, ...]:
    meta = answer["meta_info"]
    return meta["spec_verify_ct"], meta["spec_correct_drafts_histogram"], answer["output_ids"]


def test_prefix_hits_keep_the_accept_trace(server: tuple[str, Client], mixed: Mixed) -> None:
    """B1, B3: whole, partial and inside-a-page hits accept what a cold prefill accepts."""
    name, client = server
    prompt = max((p for p, _ in mixed if p.startswith("<|im_start|>")), key=len)
    variants = [prompt, prompt + "Then", prompt[: len(prompt) // 2], prompt[:-30] + " and 7"]
    for variant in variants:
        client.flush()
        cold = client.generate(variant)
        client.flush()
        client.generate(prompt)
        warm = client.generate(variant)
        assert trace(warm) == trace(cold)
        assert cold["meta_info"]["cached_tokens"] == 0
        if "noradix" not in name and variant.startswith(prompt):
            assert warm["meta_info"]["cached_tokens"] > 0


def test_abort_in_mid_block(server: tuple[str, Client], mixed: Mixed) -> None:
    """An aborted request leaves nothing behind: the next ones answer as before."""
    _, client = server
    rid = f"abort-{random.random()}"
    answer: list[requests.Response] = []

    def ask() -> None:
        body = {"text": "def f(", "rid": rid, "stream": False}
        body["sampling_params"] = {"max_new_tokens": 8000, "temperature": 0, "ignore_eos": True}
        answer.append(requests.post(f"{client.url}/generate", json=body, timeout=300))

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(1.0)
    assert client.post("/abort_request", {"rid": rid}).status_code == 200
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert answer[0].json()["meta_info"]["finish_reason"]["type"] == "abort"
    prompt, expected = mixed[0]
    assert visible(client.generate(prompt, max_new_tokens=96)) == visible(expected)
    client.flush()


def test_release_resume_and_weight_update(server: tuple[str, Client], mixed: Mixed) -> None:
    """B25: weights updated from disk, memory released and resumed: the same accept trace."""
    _, client = server
    prompt, expected = mixed[1]
    client.flush()
    before = client.generate(prompt, max_new_tokens=96)
    again = {"model_path": str(TARGET), "recapture_cuda_graph": True}
    updated = client.post("/update_weights_from_disk", again)
    assert updated.json()["success"], updated.text
    assert trace(client.generate(prompt, max_new_tokens=96)) == trace(before)
    assert client.post("/release_memory_occupation").status_code == 200
    assert client.post("/resume_memory_occupation").status_code == 200
    client.flush()
    after = client.generate(prompt, max_new_tokens=96)
    assert trace(after) == trace(before)
    assert visible(after) == visible(expected)
