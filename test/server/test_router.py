"""SGLang's router in front of two servers: what it keeps, and what it drops."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from sglang_dflash.tiny.prompts import held_out
from test.differential.ask import compare
from test.fleet import is_kept, routed
from test.servers import ALL_FEATURES, FULL, Client, chat, running

pytestmark = pytest.mark.ci
Two = tuple[Client, Client]
UNKNOWN = ("/dflash", "/server_info", "/model_info")
UNKNOWN_CALLS = ("/tokenize", "/abort_request")
STOPPED = {"text": "def main(", "sampling_params": {"temperature": 0, "stop_regex": ["[a-z]"]}}
WRONG: dict[str, dict[str, Any]] = {
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 1, "structural_tag": "?"}},
    "/v1/chat/completions": {
        "model": "default",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 1,
        "custom_logit_processor": "?",
    },
}
BIAS = {"5": 100.0}
PREFIX = "You are a careful accountant. Read each story twice, and answer in one short sentence. "
OTHER = "Du bist ein Dichter, und jede deiner Antworten ist ein Gedicht von zwei bis vier Zeilen. "


@pytest.fixture(scope="module")
def two() -> Iterator[Two]:
    with (
        running(*ALL_FEATURES, *FULL, dflash=True) as first,
        running(*ALL_FEATURES, *FULL, dflash=True) as second,
    ):
        yield first, second


@pytest.fixture(scope="module")
def router(two: Two) -> Iterator[str]:
    with routed(*(server.url for server in two)) as url:
        yield url


def test_random_requests(router: str, reference: Client) -> None:
    report = compare(21, range(42), reference.url, router, wanted=is_kept)
    assert report.compared > 24
    assert not report.differing, [(r.number, r.features, why) for r, why in report.differing]


def asked(url: str, path: str, body: dict[str, Any]) -> Any:
    answer = requests.post(f"{url}{path}", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_what_it_drops(router: str, two: Two) -> None:
    """docs/scaling.md has the list. A field that is dropped has no effect."""
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": 8}
    plain = {"text": "def main(", "sampling_params": sampling}
    biased = {"text": "def main(", "sampling_params": sampling | {"logit_bias": BIAS}}
    ids = {
        url: [asked(url, "/generate", body)["output_ids"] for body in (plain, biased)]
        for url in (two[0].url, router)
    }
    assert ids[router] == [ids[two[0].url][0]] * 2
    assert ids[two[0].url][1] == [5] * 8
    watched = plain | {"return_logprob": True}
    watched["sampling_params"] = sampling | {"custom_params": {"spec_steps": True}}
    assert "spec_steps" in asked(two[0].url, "/generate", watched)["meta_info"]
    assert "spec_steps" not in asked(router, "/generate", watched)["meta_info"]
    for path, wrong in WRONG.items():
        statuses = [requests.post(f"{url}{path}", json=wrong).status_code for url in ids]
        assert statuses == [400, 200]
    stopped = [asked(url, "/generate", STOPPED) for url in ids]
    reasons = [answer["meta_info"]["finish_reason"] for answer in stopped]
    assert [reason.get("matched") for reason in reasons] == ["[a-z]", None]
    for path in UNKNOWN:
        statuses = [requests.get(f"{url}{path}", timeout=30).status_code for url in ids]
        assert statuses == [200, 404]
    for path in UNKNOWN_CALLS:
        body = {"prompt": "a", "rid": "none"}
        statuses = [requests.post(f"{url}{path}", json=body).status_code for url in ids]
        assert statuses == [200, 404]


def test_a_shared_prefix_goes_to_the_server_that_has_it(router: str, two: Two) -> None:
    """With the draft's context KV: cached prompts are accepted as on one server."""
    for server in two:
        server.flush()
    questions = [example.prompt for example in held_out("word", 8, seed=23)]
    prompts = [chat(prefix + question) for question in questions for prefix in (PREFIX, OTHER)]

    def ask(prompt: str) -> dict[str, Any]:
        body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 48}}
        found: dict[str, Any] = asked(router, "/generate", body)["meta_info"]
        return found

    first = [ask(prompt) for prompt in prompts[:2]]
    with ThreadPoolExecutor(4) as pool:
        rest = list(pool.map(ask, prompts[2:]))
    assert all(info["cached_tokens"] < 8 for info in first)
    assert all(info["cached_tokens"] > 20 for info in rest)
    two[0].flush()
    alone = [two[0].generate(prompt, max_new_tokens=48)["meta_info"] for prompt in prompts]
    key = "spec_accepted_per_position"
    assert [info[key] for info in first + rest] == [info[key] for info in alone]
