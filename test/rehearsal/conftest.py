"""Every test file of this folder runs in a process of its own, which sees an H100."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
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
    """A file as one test."""

    def collect(self) -> Iterator[pytest.Item]:
        yield OnPretendedDevice.from_parent(self, name="on_a_pretended_device")


class OnPretendedDevice(pytest.Item):
    def runtest(self) -> None:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--durations=10", str(self.path)]
        with TemporaryDirectory() as folder:
            done = subprocess.run(
                command,
                env=device.environment(Path(folder)),
                cwd=ROOT,
                capture_output=True,
                text=True,
            )
        shown = done.stdout[-20_000:] + done.stderr[-5_000:]
        if done.returncode != 0 or "skipped" in done.stdout:
            raise AssertionError(shown)
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
