"""The servers that the tests of this folder share: the reference, and one other at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from test.plugins import distribution
from test.server.apart import APART
from test.servers import SERVERS, TWO_RANKS, Client, running, without_speculation


def params(names: Iterable[str]) -> list[ParameterSet]:
    """Parameters of the fixture `server`."""
    return [
        pytest.param(name, marks=pytest.mark.full if SERVERS[name].full else (), id=name)
        for name in names
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
