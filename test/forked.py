"""Servers that are forks of a process that has imported SGLang, which is most of their start.

`python -m test.forked` is that process. It reads lines of JSON and answers each with one. `serve`
(arguments, a log, an environment) forks a server, and the answer is its process id. `status` (a
process id) asks for the status of a server, which is null while it runs. What users start imports
SGLang itself: `test/server/test_start.py` does so, too.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import setproctitle

from sglang_dflash.tools.launch import LAUNCH, Server, die_with_parent

ROOT = Path(__file__).parents[1]
# SGLang's processes import these. They load no plugin, which the server's own process does.
PRELOADED = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
)
_one_at_a_time = threading.RLock()


class ForkedServer(Server):
    """A server whose processes import nothing that SGLang always needs."""

    def _begin(self, command: list[str], log: str, environment: dict[str, str]) -> Any:
        assert tuple(command[: len(LAUNCH)]) == LAUNCH
        arguments = command[len(LAUNCH) :]
        return Forked(_ask(serve={"arguments": arguments, "log": log, "environment": environment}))


class Forked:
    """A process that another one has forked, as `subprocess.Popen` shows one of its own."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        with _one_at_a_time:
            if self._status is None:
                self._status = _ask(status=self.pid)
            return self._status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(0.01)


def _ask(**request: Any) -> Any:
    """The parent's answer."""
    with _one_at_a_time:
        parent = _parent()
        assert parent.stdin is not None
        assert parent.stdout is not None
        print(json.dumps(request), file=parent.stdin, flush=True)
        return json.loads(parent.stdout.readline())


@cache
def _parent() -> subprocess.Popen[str]:
    """The parent of this process's servers. It ends with this process, and they end with it."""
    return subprocess.Popen(
        [sys.executable, "-m", "test.forked"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # further threads would not be in a fork
    )


def _fork_servers() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # where an import may print
    for module in PRELOADED:
        importlib.import_module(module)
    setproctitle.getproctitle()  # it finds its memory beside the first environment
    for line in sys.stdin:
        request = json.loads(line)
        answer = _status(request["status"]) if "status" in request else os.fork()
        if answer == 0 and "serve" in request:
            _serve(**request["serve"])
        print(json.dumps(answer), file=answers, flush=True)


def _status(pid: int) -> int | None:
    """As `subprocess.Popen` has it: a signal's number is negative."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _serve(arguments: list[str], log: str, environment: dict[str, str]) -> NoReturn:
    """Do what `python -m sglang.launch_server` does, in a process that is new for it."""
    die_with_parent()
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    file = os.open(log, os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = ["sglang.launch_server", *arguments]
    code: Any = 0
    try:
        runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code
    except BaseException:  # noqa: BLE001 - as Python does at the end of a program
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    _fork_servers()
