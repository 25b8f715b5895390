"""A request takes several committed tokens at once as it takes them one by one."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req

from sglang_dflash.step.commit import append_until_finished
from test.any_requests import SAMPLING, TOKENS, request


def state(req: Req) -> tuple[Any, ...]:
    reason = req.finished_reason
    return list(req.output_ids), reason and reason.to_json(), req.finished_len, req.to_finish


@given(SAMPLING, st.sets(TOKENS), TOKENS, st.lists(st.lists(TOKENS, min_size=1)), st.booleans())
def test_a_row_at_once(
    sampling: dict[str, Any], ends: set[int], first: int, rows: list[list[int]], aborted: bool
) -> None:
    one, other = (request(sampling, ends, first) for _ in range(2))
    for i, row in enumerate(rows):
        if one.finished():
            break
        if aborted and i == 1:
            one.to_finish = other.to_finish = FINISH_ABORT("gone")
        before = len(one.output_ids)
        for token in row:
            one.output_ids.append(token)
            one.update_finish_state()
            if one.finished():
                break
        assert append_until_finished(other, row) == len(one.output_ids) - before
        assert state(other) == state(one)
