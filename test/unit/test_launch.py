"""A command that started servers hears every signal that should end it."""

from __future__ import annotations

import subprocess
import sys

import pytest

IN_A_FINALISER = """
import os, signal, sys, time, weakref
from sglang_dflash.launch import interrupt_on_signals

class Connection:
    pass

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
interrupt_on_signals()
connection = Connection()
weakref.finalize(connection, lambda: os.kill(os.getpid(), getattr(signal, sys.argv[1])))
try:
    del connection
    print("dropped", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_that_meets_a_finaliser_is_not_lost(name: str) -> None:
    command = [sys.executable, "-c", IN_A_FINALISER, name]
    run = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    assert run.stdout.split() == ["dropped", "interrupted"]
    assert run.stderr == ""
