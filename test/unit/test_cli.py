"""The command `sglang-dflash`: its version, and the servers of the bundled pair."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from sglang_dflash import __version__
from sglang_dflash.settings.platforms import PLATFORMS
from sglang_dflash.tiny import DRAFT, TARGET
from sglang_dflash.tools import serve, watch
from sglang_dflash.tools.cli import main
from sglang_dflash.tools.launch import ServerFailed
from sglang_dflash.watch import page


def test_the_version_as_a_module() -> None:
    command = [sys.executable, "-m", "sglang_dflash", "--version"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"sglang-dflash {__version__}\n"


def test_unknown_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--json"])
    assert ended.value.code == 2
    assert "unrecognized arguments: --json" in capsys.readouterr().err


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("threads", [None, "2"])
def test_serve_suits_the_machine(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, threads: str | None
) -> None:
    """One thread and fp32 on a CPU, unless told otherwise. The user's flags come last and win."""
    platform = PLATFORMS["cuda" if gpu else "cpu"]
    monkeypatch.setattr(serve, "_platform", lambda: platform)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    executed: list[Any] = []

    def execute(*given: Any) -> None:
        executed.extend(given)
        raise SystemExit

    monkeypatch.setattr(os, "execve", execute)
    with pytest.raises(SystemExit):
        main(["serve", "--port", "12345", "--dtype", "bfloat16", "--tp", "2"])
    program, command, environment = executed
    assert program == sys.executable
    assert command[1:3] == ["-m", "sglang.launch_server"]
    for pair in (("--model-path", str(TARGET)), ("--port", "12345"), ("--host", "127.0.0.1")):
        assert command[command.index(pair[0]) + 1] == pair[1]
    assert str(DRAFT) in command
    assert "--constrained-json-disable-any-whitespace" in command
    assert ("float32" in command) == (not gpu)
    assert command[-4:] == ["--dtype", "bfloat16", "--tp", "2"]
    assert environment.get("OMP_NUM_THREADS") == (threads or (None if gpu else "1"))


class Page(Exception):
    """Raised where the page would be served."""


class Started:
    """In the place of `Server`. What was started and ended stands in `EVENTS`."""

    def __init__(self, flags: list[str], _: dict[str, str]) -> None:
        self.url = "http://dflash" if "DFLASH" in flags else "http://plain"

    def __enter__(self) -> Started:
        EVENTS.append(f"start {self.url}")
        return self

    def __exit__(self, *_: object) -> None:
        EVENTS.append(f"end {self.url}")


EVENTS: list[str] = []


def test_watch_compares_the_bundled_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a URL. Both servers end with the page."""

    def show(html: str, port: int) -> None:
        assert port == 1234
        assert '{"servers": ["http://dflash"], "without": "http://plain", "api_key": null}' in html
        EVENTS.append("page")
        raise Page

    monkeypatch.setattr(watch, "Server", Started)
    monkeypatch.setattr(page, "serve", show)
    with pytest.raises(Page):
        main(["watch", "--port", "1234"])
    urls = ["http://plain", "http://dflash"]
    started, ended = [f"start {url}" for url in urls], [f"end {url}" for url in reversed(urls)]
    assert [*started, "page", *ended] == EVENTS


def test_a_server_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ServerFailed("The server exited.")

    monkeypatch.setattr(watch, "Server", fail)
    assert main(["watch"]) == 1
    assert capsys.readouterr().err == "The server exited.\n"
