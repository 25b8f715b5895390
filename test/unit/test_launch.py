"""A command that starts servers handles every signal that should end it, and owns its ports."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from sglang_dflash.tools import launch
from sglang_dflash.tools.launch import OF_DP_ATTENTION, PORTS, Server, free_port

IN_A_FINALISER = """
import os, signal, sys, time, weakref
from sglang_dflash.tools.launch import interrupt_on_signals

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
    run = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["dropped", "interrupted"]
    assert run.stderr == ""


IN_ANOTHER_PROCESS = """
import sys
from sglang_dflash.tools import launch

launch._untried = iter([int(sys.argv[1]), *launch._untried])
print(launch.free_port())
"""


def test_no_two_processes_are_given_one_port() -> None:
    """Even if nothing is bound to it yet: a server binds its ports long after they are chosen."""
    port = free_port()
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(port)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) != port


def test_no_port_is_another_one_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang finds these itself, and ends if one is in use."""
    server = free_port(OF_DP_ATTENTION)
    others = [server + more for more in OF_DP_ATTENTION]
    monkeypatch.setattr(launch, "_untried", iter([*others, *PORTS]))
    given = free_port()
    assert given not in others
    below = [given - more for more in OF_DP_ATTENTION]
    monkeypatch.setattr(launch, "_untried", iter([*below, *PORTS]))
    assert free_port(OF_DP_ATTENTION) not in below


@pytest.mark.sglang
def test_the_ports_of_dp_attention_are_those_of_sglang() -> None:
    """`PortArgs.init_new` takes seven in a row."""
    from sglang.srt.server_args import DP_ATTENTION_HANDSHAKE_PORT_DELTA, ZMQ_TCP_PORT_DELTA

    row = range(ZMQ_TCP_PORT_DELTA, ZMQ_TCP_PORT_DELTA + 7)
    assert (DP_ATTENTION_HANDSHAKE_PORT_DELTA, *row) == OF_DP_ATTENTION


WITH_A_CHILD = "import subprocess, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"


@pytest.fixture
def server() -> Iterator[Server]:
    """A process in the place of a server, with a child."""
    server = Server([], command=(sys.executable, "-c", WITH_A_CHILD))
    while not server._server.children():
        time.sleep(0.05)
    yield server
    server.stop()


def test_stop_ends_a_server_and_its_children(server: Server) -> None:
    (child,) = server._server.children()
    server.stop()
    assert not server.alive
    assert not child.is_running()
    server.stop()


def test_an_interrupted_stop_leaves_no_frozen_server(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    (child,) = server._server.children()

    def interrupted(recursive: bool) -> list[psutil.Process]:
        raise KeyboardInterrupt

    monkeypatch.setattr(server._server, "children", interrupted)
    with pytest.raises(KeyboardInterrupt):
        server.stop()
    assert server._process.wait(timeout=60) != 0
    child.kill()


def test_stop_after_a_server_has_ended() -> None:
    """Its number may belong to another process by then."""
    server = Server([], command=(sys.executable, "-c", ""))
    assert server._process.wait(timeout=60) == 0
    server.stop()
    assert server._process.returncode == 0
