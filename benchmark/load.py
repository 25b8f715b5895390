"""Load on one server, or on a fleet, at a fixed concurrency, from a client that uses little CPU.

The `openai` client takes 3.6 ms of CPU per answer, this one takes 0.1 ms (docs/benchmarks.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmark.workloads import Prompt

TIMEOUT = aiohttp.ClientTimeout(total=1800)


@dataclass(frozen=True)
class Settings:
    """The settings of every request."""

    concurrency: int
    max_tokens: int
    temperature: float
    template: dict[str, Any]  # chat-template switches
    ignore_eos: bool = False
    filters: dict[str, float] = field(default_factory=dict)  # top_p, top_k, min_p


@dataclass
class Answer:
    text: str
    tokens: int
    meta: dict[str, Any] = field(default_factory=dict)  # SGLang's meta_info; empty if streamed
    first_s: float = 0.0  # time to first token, streamed
    gaps: list[float] = field(default_factory=list)  # seconds per token after the first, streamed


def accept_length(answers: list[Answer]) -> float:
    """Tokens per verify step, without an answer's first one, which prefill gives. 1 if no steps."""
    return _tokens_a_step([(answer.tokens, answer.meta) for answer in answers])


def accept_length_of(metas: list[dict[str, Any]]) -> float:
    """The accept length of answers of which only the meta_info is known."""
    return _tokens_a_step([(meta["completion_tokens"], meta) for meta in metas])


def _tokens_a_step(answers: list[tuple[int, dict[str, Any]]]) -> float:
    steps = sum(meta.get("spec_verify_ct", 0) for _, meta in answers)
    return round(sum(tokens - 1 for tokens, _ in answers) / steps, 4) if steps else 1.0


def answer_all(
    urls: Sequence[str], prompts: list[Prompt], settings: Settings
) -> tuple[list[Answer], float]:
    """Whole answers with meta_info, and the seconds that all of them took.

    Each request goes to the server that has the fewest. The concurrency is that of all servers.
    """
    return asyncio.run(_all(urls, prompts, settings, _whole))


def stream_all(urls: Sequence[str], prompts: list[Prompt], settings: Settings) -> list[Answer]:
    """Streamed answers, with the latency that a user sees."""
    return asyncio.run(_all(urls, prompts, settings, _streamed))[0]


Ask = Callable[[aiohttp.ClientSession, Prompt, Settings], Awaitable[Answer]]


async def _all(
    urls: Sequence[str], prompts: list[Prompt], settings: Settings, ask: Ask
) -> tuple[list[Answer], float]:
    turn = asyncio.Semaphore(settings.concurrency)
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for url in urls:
            connections = aiohttp.TCPConnector(limit=0)
            base = f"{url}/"  # aiohttp appends paths that begin without a slash
            client = aiohttp.ClientSession(base, connector=connections, timeout=TIMEOUT)
            clients.append(await stack.enter_async_context(client))
        running = dict.fromkeys(clients, 0)

        async def one(prompt: Prompt) -> Answer:
            async with turn:
                client = min(clients, key=running.__getitem__)
                running[client] += 1
                answer = await ask(client, prompt, settings)
                running[client] -= 1
                return answer

        started = time.perf_counter()
        answers = await asyncio.gather(*map(one, prompts))
        return answers, time.perf_counter() - started


async def _whole(client: aiohttp.ClientSession, prompt: Prompt, settings: Settings) -> Answer:
    if not prompt.chat:  # only the native endpoint reports acceptance for a raw prompt
        sampling: dict[str, Any] = {"temperature": settings.temperature} | settings.filters
        sampling |= {"max_new_tokens": settings.max_tokens, "ignore_eos": settings.ignore_eos}
        raw = await _asked(client, "generate", {"text": prompt.text, "sampling_params": sampling})
        return Answer(raw["text"], raw["meta_info"]["completion_tokens"], raw["meta_info"])
    path, body = _request(prompt, settings)
    reply = await _asked(client, path, body | {"return_meta_info": True})
    choice = reply["choices"][0]
    tokens, text = reply["usage"]["completion_tokens"], choice["message"]["content"]
    return Answer(text, tokens, choice["meta_info"])


async def _streamed(client: aiohttp.ClientSession, prompt: Prompt, settings: Settings) -> Answer:
    """`continuous_usage_stats` counts the tokens of each chunk, because a step commits several."""
    path, body = _request(prompt, settings)
    usage = {"include_usage": True, "continuous_usage_stats": True}
    started = last = time.perf_counter()
    answer = Answer("", 0)
    async for chunk in _chunks(client, path, body | {"stream": True, "stream_options": usage}):
        new = (chunk.get("usage") or {}).get("completion_tokens", 0) - answer.tokens
        if new <= 0:
            continue
        now = time.perf_counter()
        if answer.tokens:
            answer.gaps += [(now - last) / new] * new
        else:
            answer.first_s = now - started
        answer.tokens, last = answer.tokens + new, now
    if not answer.tokens:
        raise RuntimeError("A stream ended without a token.")
    return answer


async def _asked(client: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with client.post(path, json=body) as reply:
        await _raise_for_status(reply)
        answer: dict[str, Any] = await reply.json()
        return answer


async def _chunks(
    client: aiohttp.ClientSession, path: str, body: dict[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """Server-sent events, up to the one that ends the stream."""
    async with client.post(path, json=body) as reply:
        await _raise_for_status(reply)
        async for line in reply.content:
            data = line.removeprefix(b"data: ").strip()
            if data and data != b"[DONE]":
                chunk: dict[str, Any] = json.loads(data)
                if "error" in chunk:  # with HTTP 200, because the answer has begun
                    raise RuntimeError(chunk["error"])
                yield chunk


async def _raise_for_status(reply: aiohttp.ClientResponse) -> None:
    """Raise an error with the text of the server's answer, not only with its status."""
    if not reply.ok:
        raise RuntimeError(f"HTTP {reply.status}: {(await reply.text())[:500]}")


def _request(prompt: Prompt, settings: Settings) -> tuple[str, dict[str, Any]]:
    """Path and body of a chat completion or a completion of OpenAI's API."""
    body: dict[str, Any] = {
        "model": "default",
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "ignore_eos": settings.ignore_eos,
        **settings.filters,
    }
    if not prompt.chat:
        return "v1/completions", body | {"prompt": prompt.text}
    messages = [{"role": "user", "content": prompt.text}]
    template = {"messages": messages, "chat_template_kwargs": settings.template}
    return "v1/chat/completions", body | template
