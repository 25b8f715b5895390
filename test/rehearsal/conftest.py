"""Runs every test file of this folder in its own process, which sees a simulated H100."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from test.rehearsal import device

ROOT = Path(__file__).parents[2]
PRETENDING = device.VARIABLE in os.environ

if PRETENDING:
    device.pretend()


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> pytest.Collector | None:
    return None if PRETENDING else Rehearsal.from_parent(parent, path=module_path)


class Rehearsal(pytest.File):
    """A file that is one test. It has the marker of a file whose tests all have it.

    No other file may be without a test: pytest's exit code 5 is a failure.
    """

    def collect(self) -> Iterator[pytest.Item]:
        item: pytest.Item
        item = OnPretendedDevice.from_parent(self, name="on_a_pretended_device")
        item.add_marker(pytest.mark.timeout(0))  # it has a limit of its own
        if marker := re.search(r"^pytestmark = pytest\.mark\.(\w+)$", self.path.read_text(), re.M):
            item.add_marker(marker[1])
        yield item


class OnPretendedDevice(pytest.Item):
    def runtest(self) -> None:
        with TemporaryDirectory() as folder:
            output = Path(folder, "output")
            expression = self.config.getoption("markexpr")
            process = _server().Process(target=_run, args=(str(self.path), expression, str(output)))
            process.start()
            # More than one of its tests has, so that a test that hangs shows its stack.
            minutes = 15 if "not full" in expression else 90
            process.join(60 * minutes)
            late = f"not finished in {minutes} minutes" if process.is_alive() else ""
            process.kill()
            process.join()
            shown = output.read_text(errors="replace") if output.exists() else ""
        if late or process.exitcode != 0 or "skipped" in shown:
            raise AssertionError(f"{shown[-25_000:]}\n{late or f'exit code {process.exitcode}'}")
        print(shown)

    def repr_failure(self, excinfo: Any, style: Any = None) -> str:
        return str(excinfo.value)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name


@cache
def _server() -> multiprocessing.context.ForkServerContext:
    """Forks processes that have imported SGLang on the pretended device, once for all files."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test.rehearsal.preload"])
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(device.environment(Path(_driver().name)))
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


@cache
def _driver() -> TemporaryDirectory[str]:
    """A folder for the driver's libraries, as long as this process lasts."""
    return TemporaryDirectory()


def _run(path: str, expression: str, output: str) -> None:
    """Run one file, in a process of its own."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(ROOT)
    flags = ["-q", "-x", "--durations=10", "-p", "no:cacheprovider", "-m", expression]
    code = pytest.main([*flags, path])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random target and draft, as small as the kernels of a GPU allow."""
    from test.checkpoints import write_draft, write_target
    from test.rehearsal.serving import HEADS, small_draft

    folder = tmp_path_factory.mktemp("small")
    write_target(folder / "target", num_hidden_layers=2, **HEADS)
    write_draft(folder / "draft", *small_draft())
    return folder
