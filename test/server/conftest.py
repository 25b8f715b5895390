"""The servers that the tests of this folder share: the reference, and one other at a time."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet
from selenium import webdriver

from sglang_dflash.tools.launch import Server
from test.plugins import distribution
from test.server import browsers
from test.server.apart import APART
from test.servers import SERVERS, TWO_RANKS, Client, running, without_speculation


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the end of the log of each server of a test that fails."""
    report = yield
    if report.failed:
        fixtures: dict[str, Any] = getattr(item, "funcargs", {})
        for name, value in fixtures.items():
            for one in value if isinstance(value, tuple) else (value,):
                server = one.server if isinstance(one, Client) else one
                if isinstance(server, Server) and server.log.exists():
                    report.sections.append((f"end of the log of `{name}`", server.tail(60)))
    return report


def params(names: Iterable[str]) -> list[ParameterSet]:
    """Parameters of the fixture `server`."""
    return [
        pytest.param(name, marks=getattr(pytest.mark, mark) if mark else (), id=name)
        for name, mark in ((name, SERVERS[name].mark) for name in names)
    ]


def on(*names: str) -> pytest.MarkDecorator:
    """Mark tests that take the fixture `server`: each runs once on each of these servers."""
    return pytest.mark.parametrize("server", params(names), indirect=True, scope="session")


@pytest.fixture(scope="session")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which each of two ranks notes what it verifies and commits."""
    return tmp_path_factory.mktemp("notes")


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, notes: Path) -> Iterator[Client]:
    """A server with the bundled pair, which all tests share that name it."""
    setup = SERVERS[request.param]
    environment = setup.environment
    if request.param == TWO_RANKS:
        plugin = distribution(notes, "apart", "1.0", APART)
        environment = {"PYTHONPATH": str(plugin), "NOTES": str(notes)}
    with running(
        *setup.flags, dflash=setup.dflash, environment=environment, family=setup.family
    ) as client:
        yield client


@pytest.fixture(scope="session")
def reference() -> Iterator[Client]:
    """The same installation without --speculative-algorithm."""
    with without_speculation() as client:
        yield client


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    with browsers.started() as browser:
        yield browser
