"""The judge of the differential test."""

from __future__ import annotations

from typing import Any

import pytest

from test.differential.draw import Request
from test.differential.judge import difference, judge
from test.precision import FP32_KV

pytestmark = pytest.mark.sglang


def chat(*tokens: tuple[str, float]) -> Any:
    entries = [{"token": t, "bytes": list(t.encode()), "logprob": p} for t, p in tokens]
    return {"logprobs": [{"top_logprobs": entries}]}


def native(*tokens: tuple[int, float]) -> Any:
    return {"output_top_logprobs": [[[p, t, None] for t, p in tokens]]}


@pytest.mark.parametrize(
    ("ours", "theirs", "equal"),
    [
        (native((4, -2.000001), (3, -2.0)), native((3, -2.0), (4, -2.000001)), True),
        (native((4, -2.5), (3, -2.0)), native((3, -2.0), (4, -2.000001)), False),
        (native((4, -5.0), (3, -1.0)), native((3, -1.0), (4, -5.0)), False),
        (native((5, -2.0), (3, -2.0)), native((3, -2.0), (4, -2.0)), False),
        (chat(("b", -1.0), ("a", -1.0)), chat(("a", -1.0), ("b", -1.000001)), True),
        (chat(("b", -1.0), ("a", -1.5)), chat(("a", -1.0), ("b", -1.5)), False),
        (chat(("c", -1.0), ("a", -1.0)), chat(("a", -1.0), ("b", -1.0)), False),
    ],
)
def test_near_ties_of_top_logprobs_have_any_order(ours: Any, theirs: Any, equal: bool) -> None:
    assert (difference(ours, theirs) is None) == equal


def test_output_tokens_keep_their_order() -> None:
    ours, theirs = ([[-1.0, t, None] for t in tokens] for tokens in [(3, 4), (4, 3)])
    assert difference({"output_token_logprobs": ours}, {"output_token_logprobs": theirs})


def aborted(**fields: Any) -> Any:
    return {"output_ids": [1], "meta_info": {"finish_reason": {"type": "abort"}}} | fields


IN_THE_QUEUE = {"status": 400, "error": '{"error":{"message":"Aborted by AbortReq."}}'}


@pytest.mark.parametrize(
    ("ours", "right"),
    [
        (aborted(), True),
        (aborted(output_ids=[2]), False),
        (aborted(meta_info={"finish_reason": {"type": "length"}}), False),
        (IN_THE_QUEUE, True),  # before its first token
        ({"error": {"message": "Aborted by AbortReq."}}, True),  # the same, streamed
        (IN_THE_QUEUE | {"error": "temperature must be non-negative"}, False),
    ],
)
def test_an_aborted_answer_is_a_beginning(ours: Any, right: bool) -> None:
    body = {"sampling_params": {"temperature": 0}}
    request = Request(0, "/generate", body, [], abort_after=0.1)
    whole = {"output_ids": [1, 3], "meta_info": {"finish_reason": {"type": "length"}}}
    assert (judge(request, ours, whole, FP32_KV) is None) == right


def states(cached: int, *of_tokens: float) -> dict[str, Any]:
    prompt = [[state] for state in of_tokens]
    return {"hidden_states": [prompt, [4.0]], "prompt_tokens": 3, "cached_tokens": cached}


@pytest.mark.parametrize(("theirs", "equal"), [((3.0,), True), ((3.0, 3.0), True), ((2.0,), False)])
def test_states_of_a_prompt_are_compared_from_its_end(theirs: Any, equal: bool) -> None:
    """SGLang appends those of other copies."""
    assert (difference(states(0, 1.0, 2.0, 3.0), states(2, *theirs)) is None) == equal
