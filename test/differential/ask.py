"""Asks a server without speculation one by one and a DFLASH server in company, and compares."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import requests

from test import releases
from test.differential.draw import Request, draw
from test.differential.judge import judge
from test.precision import FP32_KV, Bounds

SHOWN = 3000  # characters of an answer that differs


@dataclass
class Report:
    compared: int = 0
    left_out: int = 0  # wrong in the reference
    features: dict[str, int] = field(default_factory=dict)  # how many requests had each
    differing: list[tuple[Request, str]] = field(default_factory=list)


def ask(url: str, request: Request) -> Any:
    """The answer: JSON, or for a stream its chunks joined; an error as its status and text."""
    stream = request.body.get("stream", False)
    answer = requests.post(f"{url}{request.path}", json=request.body, timeout=600, stream=stream)
    if answer.status_code != 200:
        return {"status": answer.status_code, "error": answer.text}
    if not stream:
        return answer.json()
    chunks = [
        json.loads(line[6:])
        for line in answer.iter_lines()
        if line.startswith(b"data: ") and line != b"data: [DONE]"
    ]
    return chunks[-1] if request.path == "/generate" else joined(chunks)


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """An OpenAI stream as one object: text, logprobs, finish reason and usage."""
    whole: dict[str, Any] = {"text": "", "logprobs": [], "calls": "", "finish": None, "usage": None}
    for chunk in chunks:
        whole["usage"] = chunk.get("usage") or whole["usage"]
        for choice in chunk.get("choices", []):
            delta = choice.get("delta") or {}
            whole["text"] += choice.get("text") or delta.get("content") or ""
            for call in delta.get("tool_calls") or []:
                part = call["function"]
                whole["calls"] += (part.get("name") or "") + (part.get("arguments") or "")
            whole["logprobs"] += _logprob_items(choice.get("logprobs"))
            whole["finish"] = choice.get("finish_reason") or whole["finish"]
            whole["matched_stop"] = choice.get("matched_stop") or whole.get("matched_stop")
    return whole


def _logprob_items(logprobs: dict[str, Any] | None) -> list[Any]:
    if not logprobs:
        return []
    if "content" in logprobs:
        return logprobs["content"] or []
    columns = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
    return [list(item) for item in zip(*columns, strict=True)]


def ask_alone(url: str, request: Request) -> Any:
    """The answer of a server that answers nothing else.

    SGLang may sample for a request beside one that it has just answered (the defects in
    docs/contributors/sglang.md). A question to its scheduler takes it past that one.
    """
    requests.get(f"{url}/server_info", timeout=600).raise_for_status()
    return ask(url, request)


def expected_of(url: str, request: Request) -> Any:
    """The answer of a server without speculation.

    SGLang's streamed chats lose logprobs (the defects in docs/contributors/sglang.md). So those
    are taken from the same request without a stream.
    """
    body = request.body
    answer = ask_alone(url, request)
    if "finish" in answer and body.get("messages") and body.get("logprobs"):
        whole = ask_alone(
            url, replace(request, body=body | {"stream": False, "stream_options": None})
        )
        answer["logprobs"] = _logprob_items(whole["choices"][0]["logprobs"])
    return answer


def ask_with_company(url: str, request: Request) -> Any:
    time.sleep(request.delay)
    if request.abort_after is not None:
        rid = request.body["rid"]
        aborting = threading.Timer(
            request.abort_after, requests.post, (f"{url}/abort_request",), {"json": {"rid": rid}}
        )
        aborting.start()
    return ask(url, request)


def compare(
    seed: int,
    numbers: range | list[int],
    plain: str,
    dflash: str,
    bounds: Bounds = FP32_KV,
    adapters: tuple[str, ...] = (),
    wanted: Callable[[Request], bool] = lambda _: True,
) -> Report:
    """Ask both servers, given by their URLs, these requests of a seed, if they are wanted."""
    drawn = (draw(number, seed, adapters) for number in numbers)
    asked = [request for request in drawn if wanted(request)]
    expected = [expected_of(plain, request) for request in asked]
    with ThreadPoolExecutor(16) as pool:
        got = list(pool.map(lambda request: ask_with_company(dflash, request), asked))
    report = Report()
    for request, ours, theirs in zip(asked, got, expected, strict=True):
        if releases.is_defect(theirs):
            report.left_out += 1
            continue
        report.compared += 1
        for feature in request.features:
            report.features[feature] = report.features.get(feature, 0) + 1
        if found := judge(request, ours, theirs, bounds):
            answers = (json.dumps(answer)[:SHOWN] for answer in (ours, theirs))
            report.differing.append((request, "\n  ".join([found[:600], *answers])))
    return report
