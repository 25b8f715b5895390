"""A request takes several committed tokens at once as it takes them one by one."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.step.commit import append_until_finished

TOKENS = st.integers(0, 5)
SAMPLING = st.fixed_dictionaries(
    {
        "max_new_tokens": st.integers(1, 12),
        "stop_token_ids": st.none() | st.lists(TOKENS, min_size=1, max_size=2),
        "ignore_eos": st.booleans(),
    }
)


def request(sampling: dict[str, Any], ends: set[int], first: int) -> Req:
    """A request that has its first token from a prefill."""
    params = SamplingParams(**sampling)
    params.normalize(None)
    req = Req("r", "", [1], params, vocab_size=6, eos_token_ids=ends)
    req.output_ids.append(first)
    req.update_finish_state()
    return req


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
