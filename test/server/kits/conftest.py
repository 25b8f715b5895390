"""SGLang's own test kits (`sglang.test.kits`) on a DFLASH server, and on one without speculation.

A kit is a mixin for a `unittest.TestCase` that holds `base_url` and `process`. pytest does not
parametrise those, so `Kit` is a plain class with a test case's assertions, and the fixture
`kit_server` fills in the rest. A kit test is overridden in the class that takes the kit, with the
reason as its docstring; `test_overrides.py` holds the table in README.md to that.
"""

from __future__ import annotations

import random
import unittest
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from transformers import AutoTokenizer

from sglang_dflash.tiny import TARGET
from test.server.conftest import params
from test.servers import Client

_case = unittest.TestCase()


class Kit:
    """What SGLang's kits expect of the class that they are mixed into."""

    pytestmark = pytest.mark.usefixtures("kit_server")
    servers: ClassVar[tuple[str, ...]] = ("auto", "no speculation")
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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every kit runs on the servers that its class names."""
    if metafunc.cls is not None and issubclass(metafunc.cls, Kit):
        servers = params(metafunc.cls.servers)
        metafunc.parametrize("server", servers, indirect=True, scope="session")


@pytest.fixture(scope="class")
def kit_server(request: pytest.FixtureRequest, server: Client) -> None:
    """Fill in what the kits read from their class."""
    cls = request.cls
    cls.client, cls.dflash = server, server.dflash
    cls.base_url, cls.process = server.url, server.server._process


@pytest.fixture(autouse=True)
def seeded_and_alive(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kits draw from `random` unseeded, and some would pass against a server that has died."""
    random.seed(0)
    yield
    if request.cls is not None:
        assert request.cls.client.server.alive, request.cls.client.server.tail()
