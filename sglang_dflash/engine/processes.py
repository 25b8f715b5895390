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

    It looks at the returned processes, which are known to the end of `wait_for_ready`. The
    launcher of a further machine has no watchdog, and waits for its schedulers one after another.
    """
    launched, processes = original(*args, **given)
    if processes is None:  # Ray's
        return launched, processes
    wait_for_ready, children = launched.wait_for_ready, {process.pid for process in processes}

    def wait_for_all() -> None:
        wait_for_ready()
        found = [pid for pid in launched.all_child_pids if pid not in children]
        processes.extend(map(Descendant, found))

    launched.wait_for_ready = wait_for_all
    for name in ("wait_for_completion", "block_until_scheduler_exits"):  # of either release
        if hasattr(launched, name):
            setattr(launched, name, _watched(getattr(launched, name), processes))
    return launched, processes


def _watched(wait: Callable[[], None], processes: list[Any]) -> Callable[[], None]:
    """`wait`, while a watchdog ends this process if one of these dies.

    SGLang would then serve HTTP, without a model.
    """

    def watched() -> None:
        from sglang.srt.utils.watchdog import SubprocessWatchdog

        SubprocessWatchdog(processes).start()
        wait()
        sys.exit("sglang-dflash: The schedulers of this machine have ended, so its launcher ends.")

    return watched
