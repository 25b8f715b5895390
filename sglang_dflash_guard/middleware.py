"""HTTP bodies: those that no handler can answer are refused before it runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import orjson
from sglang.srt.entrypoints.http_server import app
from sglang.srt.entrypoints.v1_loads import router as loads
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang_dflash.errors import Refusal, shown
from sglang_dflash.seam import release
from sglang_dflash.seam.http import bad_request
from sglang_dflash_guard.endpoints import Query, check_of

DEEPEST = 256  # nested lists and objects of a body
NO_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"|[^][{}"]+', re.DOTALL)
# Escaped halves of surrogate pairs without the other half, and text that looks like one.
HALF = re.compile(
    rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]", re.DOTALL
)


def path_of(original: Any, request: Any) -> tuple[str, bool]:
    """AROUND `_get_fastapi_request_path`: the path that metrics name, and whether it is served.

    SGLang asks for the path of a route, and in this release of FastAPI a router has none.
    """
    try:
        path, served = original(request)
    except AttributeError:
        path, served = request.url.path, True
    return path, served


class BodyChecks:
    """An ASGI middleware that reads a body whole, checks it and passes it on."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.handlers = {route.path: route.name for route in _routes()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        request = Request(scope, receive)
        if request.headers.get("content-type", "").startswith("multipart/"):
            return await self.app(scope, receive, send)
        try:
            body = await request.body()
        except ClientDisconnect:
            return None
        try:
            self.check(scope["path"], body, request.query_params)
        except Refusal as refusal:
            response: ASGIApp = await bad_request(request, refusal)
            return await response(scope, receive, send)
        return await self.app(scope, _again(body, receive), send)

    def check(self, path: str, body: bytes, query: Query) -> None:
        """Raise a `Refusal` if the handler at this path could not answer."""
        if deeper(body, DEEPEST):
            raise Refusal(
                "The body is nested too deeply.", f"Nest {DEEPEST} lists and objects at most."
            )
        check = check_of(self.handlers.get(path, ""))
        if check is None and not HALF.search(body):
            return
        parsed = _read(json.loads, body)
        if HALF.search(body):
            refuse_unwritable(parsed)
        if check is not None:
            check(parsed, query)
            if not release.has_own_scheduler_step():
                _read(orjson.loads, body)  # as SGLang 0.5.23 does, for which NaN is no JSON


def _read(reads: Callable[[bytes], Any], body: bytes) -> Any:
    try:
        return reads(body) if body else None
    except ValueError as error:
        raise Refusal(f"The body is not JSON: {shown(str(error))}.", "Send JSON.") from None


def deeper(body: bytes, limit: int) -> bool:
    """Whether lists and objects are nested deeper. SGLang cannot hand them to another process."""
    if body.count(b"[") + body.count(b"{") <= limit:
        return False
    depth = 0
    for bracket in NO_BRACKETS.sub(b"", body):
        depth += 1 if bracket in b"[{" else -1
        if depth > limit:
            return True
    return False


def refuse_unwritable(parsed: Any) -> None:
    """Refuse half of a surrogate pair anywhere: neither a tokenizer nor an answer can hold it."""
    left = [parsed]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, list):
            left += value
        elif isinstance(value, str) and not _writable(value):
            raise Refusal(
                f"The body has {shown(value)}, which holds half of a surrogate pair.",
                "Send both halves of the pair, or neither.",
            )


def _writable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _routes() -> list[Any]:
    """SGLang's routes. FastAPI does not list those of an included router."""
    return [route for route in (*app.routes, *loads.routes) if hasattr(route, "name")]


def _again(body: bytes, receive: Receive) -> Receive:
    """A channel that has the body once more, and then what the client sends."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def channel() -> Message:
        return waiting.pop() if waiting else await receive()

    return channel
