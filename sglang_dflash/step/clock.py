"""The time that the parts of a step take, once something observes them."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch

Observe: TypeAlias = Callable[[float], None]  # takes seconds
UNOBSERVED: AbstractContextManager[None] = nullcontext()


class StepClock:
    """`with clock("verify"):` times what is inside, if `observe` has this part."""

    def __init__(self, queues_work: bool) -> None:
        """queues_work: a forward returns before the device has done it."""
        self.observe: dict[str, Observe] = {}
        self._queues_work = queues_work
        self._waiting: defaultdict[str, deque[tuple[Any, Any]]] = defaultdict(deque)

    def __call__(self, part: str, on_host: bool = False) -> AbstractContextManager[None]:
        """on_host: the time of the host counts, whatever the device does."""
        if part not in self.observe:
            return UNOBSERVED
        if on_host or not self._queues_work:
            return self._on_host(self.observe[part])
        return self._on_device(self.observe[part], self._waiting[part])

    @contextmanager
    def _on_host(self, observe: Observe) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        observe(time.perf_counter() - begin)

    @contextmanager
    def _on_device(self, observe: Observe, waiting: deque[tuple[Any, Any]]) -> Iterator[None]:
        """Nobody waits for the device: a call observes those before it that are done."""
        while waiting and waiting[0][1].query():
            begin, end = waiting.popleft()
            observe(begin.elapsed_time(end) / 1e3)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        waiting.append((begin, end))
