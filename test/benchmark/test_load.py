"""Tests of the benchmark's client, against a server with fixed answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest
from aiohttp import web

from benchmark import load
from benchmark.load import Settings, answer_all, stream_all
from benchmark.workloads import Prompt
from sglang_dflash.tools.launch import free_port

SETTINGS = Settings(2, 8, 0.0, {"enable_thinking": False})
PROMPTS = [Prompt("word", "How many?"), Prompt("code", "def f():", chat=False)]
USAGE = [{"usage": {"completion_tokens": count}} for count in (1, 4, 4)]
WHOLE: dict[str, dict[str, Any]] = {
    "v1/chat/completions": {
        "usage": {"completion_tokens": 4},
        "choices": [{"message": {"content": "four"}, "meta_info": {"spec_verify_ct": 1}}],
    },
    "generate": {"text": "pass", "meta_info": {"completion_tokens": 2}},
}


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The URL of the server, and the chunks that it streams."""
    chunks: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body.get("max_tokens") == 0:
            return web.json_response({"message": "no tokens asked for"}, status=400)
        if not body.get("stream"):
            prefix, _, path = request.path[1:].partition("/")
            return web.json_response(WHOLE[path] | {"model": prefix})
        stream = web.StreamResponse()
        await stream.prepare(request)
        for chunk in chunks:
            await stream.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await stream.write(b"data: [DONE]\n\n")
        return stream

    loop, port = asyncio.new_event_loop(), free_port()
    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(app)
    loop.run_until_complete(runner.setup())
    loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", port).start())
    thread = Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{port}/prefix", chunks
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_whole_answers(server: Any) -> None:
    url, _ = server
    answers, seconds = answer_all([url], PROMPTS, SETTINGS)
    assert [(answer.text, answer.tokens) for answer in answers] == [("four", 4), ("pass", 2)]
    assert answers[0].meta == {"spec_verify_ct": 1}
    assert seconds > 0


def test_a_fleet_shares_requests(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two servers gets one of two requests that run at once."""
    url, _ = server
    asked: list[str] = []
    ask = load._asked

    async def watched(*given: Any) -> Any:
        answer = await ask(*given)
        asked.append(answer["model"])
        return answer

    monkeypatch.setattr(load, "_asked", watched)
    urls = [url, url.replace("prefix", "second")]
    answers, _ = answer_all(urls, PROMPTS, SETTINGS)
    assert [answer.text for answer in answers] == ["four", "pass"]
    assert sorted(asked) == ["prefix", "second"]


def test_a_chunks_gap_is_shared_by_its_tokens(server: Any) -> None:
    url, chunks = server
    chunks += USAGE
    for answer in stream_all([url], PROMPTS, SETTINGS):
        assert (answer.tokens, len(answer.gaps)) == (4, 3)
        assert answer.first_s > 0


def test_what_a_server_refuses_is_told(server: Any) -> None:
    url, _ = server
    with pytest.raises(RuntimeError, match=r"HTTP 400.*no tokens asked for"):
        answer_all([url], PROMPTS[:1], Settings(1, 0, 0.0, {}))


@pytest.mark.parametrize(
    ("told", "message"), [([{"error": {"message": "aborted"}}], "aborted"), ([], "without a token")]
)
def test_a_stream_that_fails_is_no_answer(server: Any, told: Any, message: str) -> None:
    """SGLang reports an error with HTTP 200 if the answer has already begun."""
    url, chunks = server
    chunks += told
    with pytest.raises(RuntimeError, match=message):
        stream_all([url], PROMPTS[:1], SETTINGS)
