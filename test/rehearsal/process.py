"""The process of a test file: a fork of one that has imported SGLang on the pretended device."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from test.forked import ROOT, Forked, Forks
from test.rehearsal import device

PRETENDED = Forks("DFLASH_FORKS_REHEARSAL", "test.rehearsal.preload")


def start() -> None:
    """Start the process that is forked, if there is none yet."""
    if not PRETENDED.started:
        PRETENDED.start(device.environment(Path(_driver().name)))


def fork(path: Path, expression: str, output: Path) -> Forked:
    """Run the tests of a file that have these markers."""
    start()
    return PRETENDED.fork(_run, output, path=str(path), expression=expression)


@cache
def _driver() -> TemporaryDirectory[str]:
    """A folder for the driver's libraries, as long as this process lasts."""
    return TemporaryDirectory()


def _run(path: str, expression: str) -> None:
    os.chdir(ROOT)
    flags = ["-q", "-x", "--durations=10", "-p", "no:cacheprovider", "-m", expression]
    sys.exit(pytest.main([*flags, path]))
