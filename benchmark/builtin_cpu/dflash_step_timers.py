"""Times every decode step of a running scheduler and its parts, by one rule for any worker.

It does nothing unless `DFLASH_STEP_TIMES` names a file. It writes one JSON line per decode step to
this file, if a step with the same requests follows: `batch`, `context` (mean tokens per request),
`step_ms`, `worker_ms` (inside `forward_batch_generation`) and the parts `draft_ms`, `verify_ms`,
`context_kv_ms`. On CUDA the parts are device time between events, so nothing waits for them.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

PATH = "DFLASH_STEP_TIMES"
PARTS = ("draft", "verify", "context_kv")


def install() -> None:
    if PATH not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.init_model_worker", attach, HookType.AFTER
    )


def attach(_: None, scheduler: Any) -> None:
    """AFTER `Scheduler.init_model_worker`: wrap the methods that the first rank's workers call.

    Drafting is everything that turns a block into drafts: embedding, layers, LM head and argmax.
    `DFlashWorker` runs them in one forward. The built-in runs head and embedding outside of it.
    Writing context KV is the projection of the target's hidden states and the store of the result.
    """
    if scheduler.ps.tp_rank != 0:
        return
    timers = StepTimers(Path(os.environ[PATH]))
    timers.wrap_step(scheduler.model_worker)
    target, worker = scheduler.tp_worker.model_runner, scheduler.draft_worker
    timers.wrap(target, "forward", "verify")
    if not scheduler.spec_algorithm.is_dflash():
        return
    timers.wrap(worker.draft_model_runner, "forward", "draft")
    timers.wrap(target.model.get_input_embeddings(), "forward", "draft")
    if hasattr(worker, "drafter"):  # DFlashWorker
        timers.wrap(worker.context_kv, "write", "context_kv")
        return
    timers.wrap(worker, "_greedy_sample_from_vocab_parallel_head", "draft")
    timers.wrap(worker.draft_model, "project_target_hidden", "context_kv")
    timers.wrap(worker, "_append_target_hidden_sequential", "context_kv")
    timers.wrap(worker, "_append_target_hidden_fused", "context_kv")


@dataclass
class Step:
    """One decode step."""

    rids: list[str]
    context: float  # mean tokens per request before the step
    begin: float
    worker_ms: float = 0.0
    step_ms: float = 0.0  # to the beginning of the next step
    spans: list[tuple[str, Any, Any]] = field(default_factory=list)  # part, its two marks


class StepTimers:
    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self._cuda = torch.cuda.is_available()
        self._step: Step | None = None  # that runs now
        self._previous: Step | None = None
        self._waiting: deque[Step] = deque()  # for the device
        self._inside = False  # a part is being timed; parts do not nest

    def wrap(self, owner: Any, method: str, part: str) -> None:
        """Time `owner.method` as a part of the step, unless it runs inside another part."""
        inner = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._step is None or self._inside:
                return inner(*args, **kwargs)
            self._inside, begin = True, self._mark()
            try:
                return inner(*args, **kwargs)
            finally:
                self._inside = False
                self._step.spans.append((part, begin, self._mark()))

        setattr(owner, method, timed)

    def wrap_step(self, worker: Any) -> None:
        inner = worker.forward_batch_generation

        def timed(batch: Any, *args: Any, **kwargs: Any) -> Any:
            now = time.perf_counter()
            if batch is None or not batch.forward_mode.is_decode():
                self._previous = None
                return inner(batch, *args, **kwargs)
            rids = [req.rid for req in batch.reqs]
            tokens = sum(len(req.origin_input_ids) + len(req.output_ids) for req in batch.reqs)
            self._finish_previous(rids, now)
            step = self._step = Step(rids, tokens / len(rids), time.perf_counter())
            try:
                result = inner(batch, *args, **kwargs)
            finally:
                self._step = None
            step.worker_ms = (time.perf_counter() - step.begin) * 1e3
            self._previous = step
            return result

        worker.forward_batch_generation = timed

    def _finish_previous(self, rids: list[str], now: float) -> None:
        """Write the step before this one, if it had the same requests.

        The time for writing lies between two steps and counts for neither.
        """
        step = self._previous
        if step is None or step.rids != rids:
            return
        step.step_ms = (now - step.begin) * 1e3
        self._waiting.append(step)
        while self._waiting and self._is_over(self._waiting[0]):
            self._write(self._waiting.popleft())

    def _write(self, step: Step) -> None:
        row = {"batch": len(step.rids), "context": step.context}
        row |= {"step_ms": step.step_ms, "worker_ms": step.worker_ms}
        for part in PARTS:
            row[f"{part}_ms"] = sum(self._ms(a, b) for name, a, b in step.spans if name == part)
        self._file.write(json.dumps(row) + "\n")

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _is_over(self, step: Step) -> bool:
        return not self._cuda or all(end.query() for _, _, end in step.spans)

    def _ms(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) if self._cuda else (end - begin) * 1e3
