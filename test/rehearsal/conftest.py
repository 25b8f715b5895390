"""Runs every test file of this folder in its own process, which sees a simulated H100."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from test.rehearsal import device, process

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
            forked = process.fork(self.path, expression, output)
            # More than one of its tests has, so that a test that hangs shows its stack, and three
            # times what the longest file takes.
            minutes = 20 if "not full" in expression else 90
            late = ""
            try:
                forked.wait(60 * minutes)
            except subprocess.TimeoutExpired:
                late = f"not finished in {minutes} minutes"
            finally:
                forked.kill()
            shown = output.read_text(errors="replace")
        if late or forked.poll() != 0 or "skipped" in shown:
            raise AssertionError(f"{shown[-25_000:]}\n{late or f'exit code {forked.poll()}'}")
        print(shown)

    def repr_failure(self, excinfo: Any, style: Any = None) -> str:
        return str(excinfo.value)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random target and draft, as small as the kernels of a GPU allow."""
    from test.checkpoints import write_draft, write_target
    from test.rehearsal.serving import HEADS, small_draft

    folder = tmp_path_factory.mktemp("small")
    write_target(folder / "target", num_hidden_layers=2, **HEADS)
    write_draft(folder / "draft", *small_draft())
    return folder
