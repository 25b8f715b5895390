"""Streams join to the answer that is not streamed, with --incremental-streaming-output, too."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from sglang_dflash.tiny import TARGET
from sglang_dflash.tiny.prompts import held_out
from test.server.conftest import on
from test.servers import Client, chat, running

PROMPTS = [example.prompt for example in held_out("word", 2, seed=27)]
LOGPROBS = {
    "return_logprob": True,
    "top_logprobs_num": 2,
    "token_ids_logprob": [5],
}
OLLAMA = [
    ("/api/chat", {"messages": [{"role": "user", "content": PROMPTS[0]}]}),
    ("/api/generate", {"prompt": PROMPTS[0]}),
]

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def incremental() -> Iterator[Client]:
    with running("--incremental-streaming-output", dflash=True) as client:
        yield client


def events(client: Client, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    answer = client.post(path, {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a token": {"max_tokens": 1},
    "a stop string": {"stop": ["\n", " is"]},
    "echo": {"echo": True},
    "logprobs": {"logprobs": 3},
    "echo with logprobs": {"echo": True, "logprobs": 2},
    "several answers": {"n": 2},
    "several prompts": {"prompt": [chat(prompt) for prompt in PROMPTS]},
}


@pytest.mark.parametrize("options", COMPLETIONS.values(), ids=COMPLETIONS)
def test_completions(incremental: Client, options: dict[str, Any]) -> None:
    """SGLang cuts as many characters off new text as the chunk before had."""
    body = {"model": "x", "prompt": chat(PROMPTS[0]), "temperature": 0, "max_tokens": 60, **options}
    whole = incremental.post("/v1/completions", body)
    assert whole.status_code == 200, whole.text
    texts: defaultdict[int, str] = defaultdict(str)
    tokens: defaultdict[int, list[str]] = defaultdict(list)
    for event in events(incremental, "/v1/completions", body):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            logprobs = choice.get("logprobs") or {"tokens": []}
            tokens[choice["index"]] += logprobs["tokens"]
    for choice in whole.json()["choices"]:
        assert texts[choice["index"]] == choice["text"]
        logprobs = choice.get("logprobs") or {"tokens": []}
        assert tokens[choice["index"]] == logprobs["tokens"]


def test_generate(incremental: Client) -> None:
    """Text, tokens and logprobs of the chunks join to the whole answer's."""
    params = {"temperature": 0, "max_new_tokens": 60, "custom_params": {"spec_steps": True}}
    body = {"text": chat(PROMPTS[0]), "sampling_params": params, **LOGPROBS}
    whole = incremental.post("/generate", body).json()
    text, tokens, steps = "", [], {}
    joined: dict[str, list[Any]] = defaultdict(list)
    lists = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
    for event in events(incremental, "/generate", body):
        text += event["text"]
        tokens += event["output_ids"]
        for name in lists:
            joined[name] += event["meta_info"][name]
        for step in event["meta_info"].get("spec_steps", []):
            steps[step["number"]] = step["drafts"]
    assert text == whole["text"]
    assert tokens == whole["output_ids"]
    for name in lists:
        assert len(joined[name]) == len(tokens)
    chosen = [token for _, token, _ in joined["output_token_logprobs"]]
    assert chosen == tokens
    assert len(steps) == whole["meta_info"]["spec_verify_ct"]


@pytest.mark.parametrize("logprobs", [False, True], ids=["plain", "logprobs"])
def test_chat(incremental: Client, logprobs: bool) -> None:
    messages = [{"role": "user", "content": PROMPTS[0]}]
    body = {"model": "x", "messages": messages, "temperature": 0, "max_tokens": 60}
    body["logprobs"] = logprobs
    whole = incremental.post("/v1/chat/completions", body).json()["choices"][0]
    text, tokens = "", []
    for event in events(incremental, "/v1/chat/completions", body):
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
            found = choice.get("logprobs") or {"content": []}
            tokens += [entry["token"] for entry in found["content"]]
    assert text == whole["message"]["content"]
    if logprobs:
        assert tokens == [entry["token"] for entry in whole["logprobs"]["content"]]


def test_responses(incremental: Client) -> None:
    """SGLang's last event has the text of the last chunk."""
    body = {"model": str(TARGET), "input": PROMPTS[0], "temperature": 0, "max_output_tokens": 60}
    whole = incremental.post("/v1/responses", body).json()
    *_, last = events(incremental, "/v1/responses", body)
    assert last["type"] == "response.completed"
    [said], [streamed] = (
        [part["text"] for item in answer["output"] for part in item["content"]]
        for answer in (whole, last["response"])
    )
    assert streamed == said


def test_messages(incremental: Client) -> None:
    messages = [{"role": "user", "content": PROMPTS[0]}]
    body = {"model": "x", "messages": messages, "temperature": 0, "max_tokens": 60}
    [said] = incremental.post("/v1/messages", body).json()["content"]
    deltas = [event.get("delta", {}) for event in events(incremental, "/v1/messages", body)]
    assert "".join(delta.get("text", "") for delta in deltas) == said["text"]


def joins(client: Client, path: str, body: dict[str, Any]) -> None:
    """The streamed text of Ollama's API is that of the answer that is not streamed."""

    def text_of(part: dict[str, Any]) -> str:
        text: str = part["message"]["content"] if "message" in part else part["response"]
        return text

    body = {"model": "x", "options": {"temperature": 0, "num_predict": 40}, **body}
    whole = client.post(path, {**body, "stream": False}).json()
    lines = client.post(path, {**body, "stream": True}).text.splitlines()
    parts = [json.loads(line) for line in lines]
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert "".join(text_of(part) for part in parts) == text_of(whole)


@pytest.mark.parametrize(("path", "body"), OLLAMA, ids=[path for path, _ in OLLAMA])
def test_ollama(incremental: Client, path: str, body: dict[str, Any]) -> None:
    """SGLang drops the text of the last chunk, and with the flag that of others."""
    joins(incremental, path, body)


@on("auto")
@pytest.mark.parametrize(("path", "body"), OLLAMA, ids=[path for path, _ in OLLAMA])
def test_ollama_without_the_flag(server: Client, path: str, body: dict[str, Any]) -> None:
    joins(server, path, body)
