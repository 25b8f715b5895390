"""An answer ends where it ends without speculation, also inside a block."""

from __future__ import annotations

import json
from typing import Any

import pytest

from test.differential.draw import TAG
from test.server.conftest import on
from test.servers import TWO_RANKS, Client, chat

PROBLEM = (
    "Paul has 55 stickers. Rita has 14 fewer stickers than Paul. How many stickers do Paul and "
    "Rita have together?"
)
SENTENCE = {"regex": r"[A-Z][a-z ]{5,20}\.", "max_new_tokens": 40}
ENDS: dict[str, dict[str, Any]] = {
    "a pattern before a stop string": {"stop": [" = ", " the"], "stop_regex": [r"\d\d"]},
    "a stop string before a pattern": {"stop": [" has"], "stop_regex": [r"= \d+"]},
    "a stop token before a stop string": {"stop_token_ids": [24], "stop": [" - "]},
    "the length before a stop string": {"max_new_tokens": 6, "stop": [" - "]},
    "a grammar": SENTENCE,
    "a grammar, but not the end token": SENTENCE | {"ignore_eos": True},
    "a grammar before the least length": SENTENCE | {"min_new_tokens": 35},
    "the end token as the end of a grammar": {"structural_tag": json.dumps(TAG)},
    "a grammar that ends inside a block": {"structural_tag": json.dumps(TAG), "ignore_eos": True},
    "a stop string inside of a grammar": SENTENCE | {"stop": ["e"]},
}


@on("auto")
@pytest.mark.parametrize("end", ENDS)
def test_the_first_end_counts(server: Client, reference: Client, end: str) -> None:
    answers = [each.post("/generate", body(ENDS[end])).json() for each in (server, reference)]
    ours, theirs = ([a.get("output_ids"), a["meta_info"]["finish_reason"]] for a in answers)
    assert ours == theirs
    assert answers[0]["text"] == answers[1]["text"]


def body(sampling: dict[str, Any]) -> dict[str, Any]:
    return {
        "text": chat(PROBLEM),
        "sampling_params": {"temperature": 0, "max_new_tokens": 64, **sampling},
    }


@on(TWO_RANKS)
def test_the_kv_pool_ends_an_answer(server: Client) -> None:
    """The slots of the next blocks must fit, too. A longer request would wait for ever."""
    prompt = chat(PROBLEM)
    answer = server.generate(prompt, max_new_tokens=10_000, ignore_eos=True)
    length = answer["meta_info"]["prompt_tokens"] + len(answer["output_ids"])
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert 1024 - 2 * 16 - 64 <= length < 1024
