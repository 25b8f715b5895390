"""The time that the parts of a step take, for Prometheus. The step does not know of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

Observe: TypeAlias = Callable[[float], None]  # takes seconds


def time_on_host(owner: Any, method: str, observe: Observe) -> None:
    """From now on, observe how long the host is inside of `owner.method`."""
    inner = getattr(owner, method)

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = inner(*args, **kwargs)
        observe(time.perf_counter() - begin)
        return result

    setattr(owner, method, timed)


def time_on_device(owner: Any, method: str, observe: Observe) -> None:
    """From now on, observe how long the device takes for what `owner.method` queues.

    Nobody waits for it: a call observes those before it that are done.
    """
    inner, waiting = getattr(owner, method), deque[tuple[Any, Any]]()

    def timed(*args: Any, **kwargs: Any) -> Any:
        while waiting and waiting[0][1].query():
            begin, end = waiting.popleft()
            observe(begin.elapsed_time(end) / 1e3)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = inner(*args, **kwargs)
        end.record()
        waiting.append((begin, end))
        return result

    setattr(owner, method, timed)
