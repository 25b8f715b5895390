"""Processes that are forks of one that has imported SGLang, which is most of a server's start.

`python -m test.forked SOCKET MODULE` is that one. It imports the module when it is first asked for
a fork. All workers of a test run ask the same one. What users start imports SGLang itself:
`test/server/test_start.py` does so, too.
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Client, Listener
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import setproctitle

from sglang_dflash.tools.launch import LAUNCH, Server, die_with_parent

ROOT = Path(__file__).parents[1]


class Forks:
    """A process that forks others. It ends with the process that has started it."""

    def __init__(self, variable: str, module: str) -> None:
        """variable: of the environment, where further processes find the first one's socket."""
        self._variable, self._module = variable, module
        self._kept: tuple[Any, ...] = ()

    @property
    def started(self) -> bool:
        return self._variable in os.environ

    def start(self, environment: Mapping[str, str]) -> None:
        folder = TemporaryDirectory(prefix="forks-")
        path = os.path.join(folder.name, "socket")
        process = subprocess.Popen(
            [sys.executable, "-m", "test.forked", path, self._module],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=dict(environment),
            preexec_fn=die_with_parent,
        )
        assert process.stdout is not None
        process.stdout.readline()
        os.environ[self._variable] = path
        self._kept = folder, process

    def fork(self, function: Callable[..., Any], log: str | Path, **arguments: Any) -> Forked:
        """Call a function in a process of its own, which writes to a log."""
        return Forked(self._ask(_fork, function, str(log), arguments), self._ask)

    def _ask(self, *request: Any) -> Any:
        with Client(os.environ[self._variable]) as connection:
            connection.send(request)
            return connection.recv()


class Forked:
    """A forked process, as `subprocess.Popen` shows a child."""

    def __init__(self, pid: int, ask: Callable[..., Any]) -> None:
        self.pid = pid
        self._ask = ask
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            self._status = self._ask(_status, self.pid)
        return self._status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + timeout if timeout else float("inf")
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired([], timeout or 0.0)
            time.sleep(0.05)
        return status


SGLANG = Forks("DFLASH_FORKS", "test.preload")


def start() -> None:
    """Start the process of `ForkedServer`, if there is none yet."""
    if not SGLANG.started:
        # Further threads would not be in a fork, and torch reads the second one when imported.
        alike = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
        SGLANG.start({**os.environ, **alike})


class ForkedServer(Server):
    """A server whose processes import nothing that SGLang always needs."""

    def _begin(self, command: list[str], log: str, environment: dict[str, str]) -> Any:
        assert tuple(command[: len(LAUNCH)]) == LAUNCH
        start()
        arguments = command[len(LAUNCH) :]
        return SGLANG.fork(_serve, log, arguments=arguments, environment=environment)


def _main(socket: str, module: str) -> None:
    setproctitle.getproctitle()  # it finds its memory beside the first environment
    with Listener(socket, backlog=64) as listener:
        os.write(1, b"listening\n")
        os.dup2(2, 1)  # where an import may print
        while True:
            with listener.accept() as connection:
                importlib.import_module(module)
                answer, *arguments = connection.recv()
                connection.send(answer(*arguments))


def _fork(function: Callable[..., Any], log: str, arguments: dict[str, Any]) -> int:
    return os.fork() or _forked(function, log, arguments)


def _forked(function: Callable[..., Any], log: str, arguments: dict[str, Any]) -> NoReturn:
    die_with_parent()
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    code: Any = 0
    try:
        function(**arguments)
    except SystemExit as ended:
        code = ended.code
    except BaseException:  # noqa: BLE001 - as Python does at the end of a program
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def _status(pid: int) -> int | None:
    """As `subprocess.Popen` has it: a signal's number is negative."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _serve(arguments: list[str], environment: dict[str, str]) -> None:
    """Do what `python -m sglang.launch_server` does."""
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = ["sglang.launch_server", *arguments]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
