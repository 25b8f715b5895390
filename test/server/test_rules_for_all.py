"""Flags that give every request a grammar, also the one of `/health`: servers with and without."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from sglang_dflash.tiny.prompts import held_out
from test.checkpoints import write_with_added_tokens
from test.servers import Client, chat, running

PROMPTS = [example.prompt for example in held_out("word", 3, seed=31)]
NUMBERS = [1, 23, 456]
SCHEMA = {"type": "object", "properties": {"n": {"enum": NUMBERS}}, "required": ["n"]}
JSON = {"type": "json_schema", "json_schema": {"name": "number", "schema": SCHEMA}}


def said(client: Client, prompt: str, **fields: Any) -> dict[str, Any]:
    """A chat's answer: content, thought, finish reason and the number of tokens."""
    body = {"model": "m", "messages": [{"role": "user", "content": prompt}], "max_tokens": 40}
    response = client.post("/v1/chat/completions", body | {"temperature": 0} | fields)
    assert response.status_code == 200, response.text
    answer = response.json()
    [choice] = answer["choices"]
    fields = {name: choice["message"][name] for name in ("content", "reasoning_content")}
    return fields | {"reason": choice["finish_reason"], "usage": answer["usage"]}


def streamed(client: Client, prompt: str, **fields: Any) -> dict[str, str]:
    """The joined text of a streamed chat."""
    body = {"model": "m", "messages": [{"role": "user", "content": prompt}], "max_tokens": 40}
    body |= {"temperature": 0, "stream": True} | fields
    joined = {"content": "", "reasoning_content": ""}
    url = f"{client.url}/v1/chat/completions"
    with requests.post(url, json=body, stream=True, timeout=120) as response:
        for line in response.iter_lines():
            if line.startswith(b"data: {"):
                for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
                    for name in joined:
                        joined[name] += choice["delta"].get(name) or ""
    return joined


def thinking(client: Client) -> list[Any]:
    """Chats that think or not, with a budget or a grammar, alone and together."""
    budget = {"custom_params": {"thinking_budget": 7}}
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    kinds: list[dict[str, Any]] = [{}, budget, off, budget | {"response_format": JSON}]
    kinds.append(off | {"response_format": JSON})
    answers: list[Any] = [said(client, PROMPTS[0], **kind) for kind in kinds]
    assert answers[0]["reason"] == "length"  # the end of an answer cannot come from a thought
    assert answers[2]["reasoning_content"] is None
    assert json.loads(answers[3]["content"])["n"] in NUMBERS
    answers.append(streamed(client, PROMPTS[1], **budget))
    with ThreadPoolExecutor(len(kinds)) as pool:
        answers += list(pool.map(lambda kind: said(client, PROMPTS[2], **kind), kinds))
    return answers


def preferred(client: Client) -> list[Any]:
    """Requests that name no rule get the rules of the server, and others their own."""
    answers = []
    for options in ({}, {"max_new_tokens": 9}, {"regex": "[0-9]{7}"}, {"frequency_penalty": 0.0}):
        answer = client.generate(chat(PROMPTS[0]), **options)
        answers.append((answer["output_ids"], answer["meta_info"]["finish_reason"]))
    text = client.generate(chat(PROMPTS[1]))["text"]
    assert len(text) == 30
    assert text.islower()
    return [*answers, said(client, PROMPTS[2]), streamed(client, PROMPTS[2])]


RULES = {
    "regex": "[a-z]{30}",
    "frequency_penalty": 0.4,
    "logit_bias": {"300": 2.0},
    "custom_params": {"thinking_budget": 3},
}
PREFERRED = ("--preferred-sampling-params", json.dumps(RULES))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("ask", "flags"),
    [
        (thinking, ("--reasoning-parser", "qwen3", "--enable-strict-thinking")),
        (preferred, PREFERRED),
        pytest.param(
            preferred, (*PREFERRED, "--grammar-backend", "outlines"), marks=pytest.mark.full
        ),
    ],
    ids=["strict thinking", "preferred rules", "preferred rules, outlines"],
)
def test_every_request_has_rules(
    tmp_path: Path, ask: Callable[[Client], list[Any]], flags: tuple[str, ...]
) -> None:
    """The server starts, is healthy, and says what it says without speculation."""
    words = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    target = write_with_added_tokens(tmp_path / "target", words)
    flags += "--model-path", str(target), "--constrained-json-disable-any-whitespace"
    answers = []
    for dflash in (False, True):
        with running(*flags, dflash=dflash) as client:
            assert requests.get(f"{client.url}/health", timeout=60).status_code == 200
            answers.append(ask(client))
            if dflash:  # without, SGLang may miss one that is asked for right after an answer
                assert requests.get(f"{client.url}/health", timeout=60).status_code == 200
    assert answers[0] == answers[1]
