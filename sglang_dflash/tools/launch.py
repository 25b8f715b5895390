"""Start a real SGLang server as a child process, and end it in every case."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import requests

START_SECONDS = 600
KEEP_LOGS = "DFLASH_KEEP_LOGS"  # environment
LAUNCH = (sys.executable, "-m", "sglang.launch_server")

SECOND_PORT = 10_000  # SGLang also listens on the first port plus this
OF_DP_ATTENTION = 13, *range(233, 240)  # and on the first port plus these
PORTS = range(12_000, 22_000)  # both are below the ports of outgoing connections
# SGLang seeds the common generator of `random` with the same value in every process.
_untried = iter(random.SystemRandom().sample(PORTS, len(PORTS)))
_taken: set[int] = set()
_leases: int | None = None  # kept open: a lock lasts as long as its process


def free_port(further: Iterable[int] = ()) -> int:
    """A TCP port on 127.0.0.1 that is free now. So are its second port and the port plus `further`.

    A server binds its ports long after they are chosen. So each chosen port is a locked byte of a
    file that all processes share. While this process runs, this function returns the port to no
    other process of this user.
    """
    global _leases
    if _leases is None:
        file = Path(tempfile.gettempdir(), f"sglang-dflash-ports-{os.getuid()}")
        _leases = os.open(file, os.O_RDWR | os.O_CREAT)
    for port in _untried:
        ports = {port, *(port + more for more in further)}
        with contextlib.ExitStack() as bound, contextlib.suppress(OSError):
            if ports & _taken:  # a lock keeps only other processes out
                continue
            for each in ports:
                fcntl.lockf(_leases, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, each)
            for each in (*ports, port + SECOND_PORT):
                bound.enter_context(socket.socket()).bind(("127.0.0.1", each))
            _taken.update(ports)
            return port
    raise OSError(f"No free port between {PORTS.start} and {PORTS.stop}.")


def die_with_parent() -> None:
    """In the child: end when the parent is killed, because it cannot end the child then (Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def interrupt_on_signals() -> None:
    """Let SIGTERM interrupt a command as Ctrl-C does, so that its servers are ended, too.

    Python drops an exception that a signal handler raises while a finaliser runs. In that case the
    signal is sent again.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def dropped(what: sys.UnraisableHookArgs) -> None:
        if issubclass(what.exc_type, KeyboardInterrupt):
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        else:
            sys.__unraisablehook__(what)

    signal.signal(signal.SIGTERM, interrupt)
    sys.unraisablehook = dropped


class ServerFailed(RuntimeError):
    """The server did not start. The message ends with the end of its log."""


class Server:
    """`with Server(["--model-path", ...]) as server:` gives `server.url`, ready to serve.

    The log goes to `server.log`. Leaving the block ends the server and all its children by their
    ids. The log is removed, unless an exception left the block or DFLASH_KEEP_LOGS is set.
    """

    def __init__(
        self,
        arguments: list[str],
        environment: Mapping[str, str] | None = None,
        waiting: Callable[[float], None] = lambda _: None,
        command: Sequence[str] = LAUNCH,
        port: int | None = None,
    ) -> None:
        further = OF_DP_ATTENTION if "--enable-dp-attention" in arguments else ()
        self.port = port or free_port(further)
        scheme = "https" if "--ssl-certfile" in arguments else "http"
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        self._waiting = waiting
        # SGLang would choose the NCCL port itself, and bind it many seconds later.
        listen = ["--host", "127.0.0.1", "--port", str(self.port)]
        if "--dp-size" not in arguments:  # each replica needs one of its own
            listen += ["--nccl-port", str(free_port())]
        with tempfile.NamedTemporaryFile(prefix="sglang-", suffix=".log", delete=False) as log:
            self.log = Path(log.name)
            given = {**os.environ, **(environment or {})}
            self._process = self._begin([*command, *listen, *arguments], log.name, given)
        self._server = psutil.Process(self._process.pid)  # keeps its time of creation

    def _begin(self, command: list[str], log: str, environment: dict[str, str]) -> Any:
        """The process, in a session of its own."""
        with open(log, "wb") as file:
            return subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def __enter__(self) -> Server:
        with contextlib.ExitStack() as failed:
            failed.callback(self.stop)
            self._wait()
            failed.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop()
        if kind is None and KEEP_LOGS not in os.environ:
            self.log.unlink(missing_ok=True)

    def _wait(self) -> None:
        started = time.monotonic()
        elapsed = 0.0
        while elapsed < START_SECONDS:
            self._waiting(elapsed)
            if self._process.poll() is not None:
                raise ServerFailed(f"The server exited.\n{self.tail()}")
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{self.url}/health_generate", timeout=30).status_code == 200:
                    return
            time.sleep(0.5)
            elapsed = time.monotonic() - started
        raise ServerFailed(f"The server was not ready in {START_SECONDS} s.\n{self.tail()}")

    def stop(self) -> None:
        """End the server and its children; safe to call twice.

        They are killed: SGLang waits for seconds when it is asked to end, and keeps nothing.
        """
        if self._process.poll() is not None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            try:
                self._server.suspend()  # so that it starts no further child
                children = self._server.children(recursive=True)
            finally:
                self._process.kill()
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            psutil.wait_procs(children, timeout=10)
        self._process.wait()

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @property
    def status(self) -> int | None:
        """The exit status; None while the server runs."""
        status: int | None = self._process.poll()
        return status

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def tail(self, lines: int = 40) -> str:
        """The end of the server's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
