"""The output of requests while a step is in flight.

Under overlap SGLang launches a step before it has given the tokens of the one before to their
requests. They lie in the scheduler's queue of results, where SGLang's own grammars find them, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from sglang.srt.managers.schedule_batch import Req


def output_before_anchors(grammar_barrier: Any) -> Callable[[Req, int], list[int]]:
    """A function `output_of(req, start)`, as `SamplingInput` has it.

    grammar_barrier: SGLang's argument of a step, a method of its scheduler; None without overlap.
    The first call waits until the tokens of the step before have come to the host.
    """
    late = cache(lambda: _in_flight(grammar_barrier))

    def output_of(req: Req, start: int) -> list[int]:
        missing = late().get(req.rid, [])[max(0, start - len(req.output_ids)) :]
        return [*req.output_ids[start:], *missing][:-1]

    return output_of


def _in_flight(grammar_barrier: Any) -> dict[str, list[int]]:
    """The tokens that steps in flight have committed, by request."""
    found: dict[str, list[int]] = {}
    for batch, result in grammar_barrier.__self__.result_queue if grammar_barrier else ():
        if result.copy_done is not None:
            result.copy_done.synchronize()
        ids = result.next_token_ids.tolist()
        stride = len(ids) // len(batch.reqs)
        lens = [1] * len(batch.reqs)  # after a prefill
        if result.accept_lens is not None:
            lens = result.accept_lens.tolist()
        # Of a request with a grammar, only the tokens that its grammar takes.
        taken = result.grammar_retained_tokens or [None] * len(batch.reqs)
        for i, (req, count) in enumerate(zip(batch.reqs, lens, strict=True)):
            if req.finished() or req.is_retracted or req.inflight_middle_chunks > 0:
                continue
            tokens = ids[i * stride :][:count] if taken[i] is None else taken[i]
            found.setdefault(req.rid, []).extend(tokens)
    return found
