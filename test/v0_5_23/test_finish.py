"""A request ends inside a step's tokens where it would end if it got them one by one."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req

from sglang_dflash.engine.v0_5_23.finish import finish_in_order
from test.any_requests import SAMPLING, TOKENS, request, update_finish_state


def end(req: Req) -> tuple[Any, ...]:
    """The answer of a request and why it ended, as SGLang sends them."""
    reason = req.finished_reason
    return list(req.output_ids[: req.finished_len]), reason and reason.to_json(), req.to_finish


@given(SAMPLING, st.sets(TOKENS), TOKENS, st.lists(st.lists(TOKENS, min_size=1)), st.booleans())
def test_a_step_at_once(
    sampling: dict[str, Any], ends: set[int], first: int, steps: list[list[int]], aborted: bool
) -> None:
    one, other = (request(sampling, ends, first) for _ in range(2))
    for i, step in enumerate(steps):
        if one.finished():
            break
        if aborted and i == 1:
            one.to_finish = other.to_finish = FINISH_ABORT("gone")
        for token in step:
            one.output_ids.append(token)
            update_finish_state(one)
            if one.finished():
                break
        other.output_ids.extend(step)
        finish_in_order(update_finish_state, other, len(step))
        assert end(other) == end(one)
