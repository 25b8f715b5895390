"""SGLang's own test kits (`sglang.test.kits`) against our server and against the reference.

A kit is a mixin for a `unittest.TestCase` that holds `base_url` and `process`. pytest does not
parametrise those, so `Kit` is a plain class with a test case's assertions, and the fixture `server`
fills in the rest for both sides. A kit test is overridden in the class that takes the kit, with the
reason as its docstring; `test_overrides.py` holds the table in docs/limits.md to that.
"""

from __future__ import annotations

import contextlib
import random
import unittest
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
from transformers import AutoTokenizer

from sglang_dflash.tiny import TARGET
from test.server.conftest import Client, running

_case = unittest.TestCase()


class Kit:
    """What SGLang's kits expect of the class that they are mixed into."""

    pytestmark = pytest.mark.usefixtures("server")
    flags: ClassVar[tuple[str, ...]] = ("--constrained-json-disable-any-whitespace",)  # of both
    environment: ClassVar[dict[str, str]] = {"SGLANG_DFLASH_DRAFT_AHEAD": "on"}
    model = str(TARGET)
    base_url: str
    client: Client
    process: Any  # subprocess.Popen of the server
    dflash: bool
    tokenizer = AutoTokenizer.from_pretrained(TARGET)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("assert") or name in ("fail", "subTest"):
            return getattr(_case, name)
        raise AttributeError(name)

    @classmethod
    def flush_cache(cls) -> None:
        cls.client.flush()

    def replace(self, monkeypatch: pytest.MonkeyPatch, method: str, **ours: Any) -> None:
        """Let a kit's helper be called with these arguments in place of the kit's own."""
        helper = getattr(self, method)
        monkeypatch.setattr(self, method, lambda **asked: helper(**(asked | ours)))


@pytest.fixture(
    scope="package",
    params=[
        pytest.param(True, id="dflash"),
        pytest.param(False, id="reference", marks=pytest.mark.full),
    ],
)
def dflash(request: pytest.FixtureRequest) -> bool:
    """The side: a DFLASH server, or the same install without speculation."""
    side: bool = request.param
    return side


@pytest.fixture(scope="package")
def start(dflash: bool) -> Iterator[Callable[[type[Kit]], Client]]:
    """Gives a class its server; one runs at a time and stays while the flags stay the same."""
    held = contextlib.ExitStack()
    now: tuple[Any, Client] | None = None

    def server_for(cls: type[Kit]) -> Client:
        nonlocal now
        key = (cls.flags, cls.environment)
        if now is None or now[0] != key:
            held.close()
            client = running(*cls.flags, dflash=dflash, environment=cls.environment)
            now = key, held.enter_context(client)
        return now[1]

    with held:
        yield server_for


@pytest.fixture(scope="class")
def server(
    request: pytest.FixtureRequest, dflash: bool, start: Callable[[type[Kit]], Client]
) -> None:
    """Fill in what the kits read from their class."""
    cls = request.cls
    cls.dflash, cls.client = dflash, start(cls)
    cls.base_url, cls.process = cls.client.url, cls.client.server._process


@pytest.fixture(autouse=True)
def seeded_and_alive(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kits draw from `random` unseeded, and some would pass against a server that has died."""
    random.seed(0)
    yield
    if request.cls is not None:
        assert request.cls.client.server.alive, request.cls.client.server.tail()
