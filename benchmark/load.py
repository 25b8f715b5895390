"""Load on one server by the `openai` client, at a fixed concurrency."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI

from benchmark.workloads import Prompt


@dataclass(frozen=True)
class Settings:
    """How every prompt is asked."""

    concurrency: int
    max_tokens: int
    temperature: float
    template: dict[str, Any]  # chat-template switches
    ignore_eos: bool = False


@dataclass
class Answer:
    text: str
    tokens: int
    meta: dict[str, Any] = field(default_factory=dict)  # SGLang's meta_info; empty if streamed
    first_s: float = 0.0  # time to first token, streamed
    gaps: list[float] = field(default_factory=list)  # seconds a token after the first, streamed


def accept_length(answers: list[Answer]) -> float:
    """Tokens that a verify step commits; the first of an answer comes from prefill. Else 1."""
    return _tokens_a_step([(answer.tokens, answer.meta) for answer in answers])


def accept_length_of(metas: list[dict[str, Any]]) -> float:
    """The same of answers that are known by their meta_info alone."""
    return _tokens_a_step([(meta["completion_tokens"], meta) for meta in metas])


def _tokens_a_step(answers: list[tuple[int, dict[str, Any]]]) -> float:
    steps = sum(meta.get("spec_verify_ct", 0) for _, meta in answers)
    return round(sum(tokens - 1 for tokens, _ in answers) / steps, 4) if steps else 1.0


def answer_all(url: str, prompts: list[Prompt], settings: Settings) -> tuple[list[Answer], float]:
    """Whole answers with meta_info, and the seconds that all took."""
    return asyncio.run(_all(url, prompts, settings, _whole))


def stream_all(url: str, prompts: list[Prompt], settings: Settings) -> list[Answer]:
    """Streamed answers: what a user sees of latency."""
    return asyncio.run(_all(url, prompts, settings, _streamed))[0]


Ask = Callable[[AsyncOpenAI, Prompt, Settings], Awaitable[Answer]]


async def _all(
    url: str, prompts: list[Prompt], settings: Settings, ask: Ask
) -> tuple[list[Answer], float]:
    turn = asyncio.Semaphore(settings.concurrency)
    async with AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", timeout=1800, max_retries=0
    ) as client:

        async def one(prompt: Prompt) -> Answer:
            async with turn:
                return await ask(client, prompt, settings)

        started = time.perf_counter()
        answers = await asyncio.gather(*map(one, prompts))
        return answers, time.perf_counter() - started


async def _whole(client: AsyncOpenAI, prompt: Prompt, settings: Settings) -> Answer:
    if not prompt.chat:  # only the native endpoint tells about a raw prompt's acceptance
        sampling: dict[str, Any] = {"temperature": settings.temperature}
        sampling |= {"max_new_tokens": settings.max_tokens, "ignore_eos": settings.ignore_eos}
        body = {"text": prompt.text, "sampling_params": sampling}
        url = str(client.base_url).removesuffix("v1/") + "generate"
        raw: Any = await client.post(url, body=body, cast_to=object)
        return Answer(raw["text"], raw["meta_info"]["completion_tokens"], raw["meta_info"])
    create: Any = client.chat.completions.create
    reply = await create(**_chat(prompt, settings, return_meta_info=True))
    choice = reply.choices[0]
    return Answer(choice.message.content, reply.usage.completion_tokens, choice.meta_info)


async def _streamed(client: AsyncOpenAI, prompt: Prompt, settings: Settings) -> Answer:
    """`continuous_usage_stats` counts the tokens of each chunk; a step commits several."""
    usage = {"include_usage": True, "continuous_usage_stats": True}
    started = last = time.perf_counter()
    answer = Answer("", 0)
    create: Any = client.chat.completions.create if prompt.chat else client.completions.create
    options = _chat(prompt, settings) if prompt.chat else _raw(prompt, settings)
    chunks = await create(**options, stream=True, stream_options=usage)
    async for chunk in chunks:
        new = chunk.usage.completion_tokens - answer.tokens if chunk.usage else 0
        if new <= 0:
            continue
        now = time.perf_counter()
        if answer.tokens:
            answer.gaps += [(now - last) / new] * new
        else:
            answer.first_s = now - started
        answer.tokens, last = answer.tokens + new, now
    return answer


def _chat(prompt: Prompt, settings: Settings, **extra: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt.text}]
    extra = {"chat_template_kwargs": settings.template, **extra}
    return {"messages": messages, **_common(settings, **extra)}


def _raw(prompt: Prompt, settings: Settings) -> dict[str, Any]:
    return {"prompt": prompt.text, **_common(settings)}


def _common(settings: Settings, **extra: Any) -> dict[str, Any]:
    return {
        "model": "default",
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "extra_body": {"ignore_eos": settings.ignore_eos, **extra},
    }
