"""The processes of a server: where one of them dies, the server ends.

SGLang's watchdog looks at the main process's own children. The schedulers of replicas are children
of the data-parallel controller, and on a second machine it looks at none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import psutil


class Descendant:
    """A process that is no child, as `multiprocessing.Process` shows one."""

    exitcode = "unknown"  # which its own parent knows

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._process = psutil.Process(pid)  # keeps its time of creation

    def is_alive(self) -> bool:
        try:
            return bool(self._process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False


def watch_all(original: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """AROUND `Engine._launch_scheduler_processes`: SGLang's watchdog sees each scheduler.

    It looks at the processes that are returned, when `wait_for_ready` has. The launcher of a
    further machine has no watchdog, and waits for its schedulers one after another.
    """
    launched, children = original(*args, **given)
    watched = list(children)
    wait_for_ready = launched.wait_for_ready

    def wait_for_all() -> None:
        known = set(launched.all_child_pids)  # the detokenizer's, too
        wait_for_ready()
        watched.extend(Descendant(pid) for pid in launched.all_child_pids if pid not in known)

    launched.wait_for_ready = wait_for_all
    if hasattr(launched, "wait_for_completion"):  # SGLang 0.5.13.post1
        wait = launched.wait_for_completion
        launched.wait_for_completion = lambda: _watch_and_end(wait, watched)
    else:
        wait = launched.block_until_scheduler_exits
        launched.block_until_scheduler_exits = lambda: _watch(wait, watched)
    return launched, watched


def _watch(wait: Callable[[], None], processes: list[Any]) -> None:
    """Wait for these processes, and end this one, with an error, if one of them dies."""
    from sglang.srt.utils.watchdog import SubprocessWatchdog

    watchdog = SubprocessWatchdog(processes)
    watchdog.start()
    try:
        wait()
    finally:
        watchdog.stop()
    if any(process.exitcode != 0 for process in processes):
        sys.exit("sglang-dflash: A scheduler of this machine died, so its launcher ends.")


def _watch_and_end(wait: Callable[[], None], processes: list[Any]) -> None:
    """The same, and end in any case: SGLang would then serve HTTP, without a model."""
    _watch(wait, processes)
    sys.exit()
