"""Two ranks of tensor parallelism on gloo, each in a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

SECONDS = 500  # until a rank has its result


def on_two_ranks(work: Callable[..., Any], *given: Any, method: str = "spawn") -> tuple[Any, Any]:
    """The results of `work(rank, *given)` of both ranks. `work` is a function of a module.

    Raises what a rank raises.
    """
    context: Any = multiprocessing.get_context(method)
    results = context.Queue()
    process = context.Process(target=_both, args=(work, given, results))
    process.start()
    try:
        found = {}
        for _ in range(2):
            rank, found[rank] = results.get(timeout=SECONDS)
            if isinstance(found[rank], Exception):
                raise found[rank]
        process.join(timeout=20)
    finally:
        process.kill()  # the other rank ends with it
    return found[0], found[1]


def _both(work: Callable[..., Any], given: tuple[Any, ...], results: Any) -> None:
    """Rank 0 in this process. Its fork, rank 1, need not import SGLang anew."""
    fork = multiprocessing.get_context("fork")
    other = fork.Process(target=_one, args=(work, 1, given, results), daemon=True)
    other.start()
    _one(work, 0, given, results)
    other.join()


def _one(work: Callable[..., Any], rank: int, given: tuple[Any, ...], results: Any) -> None:
    try:
        results.put((rank, work(rank, *given)))
    except Exception as error:
        results.put((rank, error))
        raise
