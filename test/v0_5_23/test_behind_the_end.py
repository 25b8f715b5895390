"""What a step leaves behind the end of a request, or of a prefill, is in no later answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sglang_dflash.tiny.prompts import held_out
from test.servers import Client, chat, running, without_speculation

SMALL = ("--max-total-tokens", "512")
PROMPT = chat(held_out("word", 2, seed=31)[1].prompt)


@pytest.fixture(scope="module")
def both() -> Iterator[list[Client]]:
    """A server without speculation, and ours."""
    with without_speculation(*SMALL) as reference, running(*SMALL, dflash=True) as server:
        yield [reference, server]


def test_a_session_goes_on_from_the_answer(both: list[Client]) -> None:
    """The answer ends inside a block."""
    turns = []
    for server in both:
        session = server.post("/open_session", {"capacity_of_str_len": 5000}).json()
        first = server.generate(PROMPT, stop=[" = "], session_params={"id": session})
        of_first = {"id": session, "rid": first["meta_info"]["id"]}
        second = server.generate(" and so", max_new_tokens=20, session_params=of_first)
        prompt_tokens = second["meta_info"]["prompt_tokens"]
        turns.append((first["output_ids"], prompt_tokens, second["output_ids"]))
    assert turns[0] == turns[1]


def test_cached_tokens(both: list[Client]) -> None:
    cached = []
    for server in both:
        prompt = list(range(700, 740))
        output = server.generate(prompt, max_new_tokens=24, ignore_eos=True)["output_ids"]
        later = server.generate([*prompt, *output, 5, 6, 7], max_new_tokens=4)
        cached.append(later["meta_info"]["cached_tokens"])
    assert cached == [63, 63]


def test_a_prompt_is_scored(both: list[Client]) -> None:
    """With `max_new_tokens` 0 there is no token, whose logprobs a temperature would scale."""
    asked: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0}
    asked |= {"token_ids_logprob": [20, 21], "temperature": 0.5, "max_new_tokens": 0}
    metas = [server.generate(PROMPT, **asked)["meta_info"] for server in both]
    assert [meta["output_token_logprobs"] for meta in metas] == [[], []]
    for name in ("input_token_logprobs", "output_token_ids_logprobs"):
        assert _values(metas[1][name]) == pytest.approx(_values(metas[0][name]), abs=1e-4), name


def test_prompts_of_a_prefill_that_is_partly_taken_back(both: list[Client]) -> None:
    """The first of its requests are retracted while it runs: the pool has no room for all."""
    prompts = [[200 + 61 * i + j for j in range(60 - 2 * i)] for i in range(8)]
    body: dict[str, Any] = {"input_ids": prompts, "return_logprob": True, "logprob_start_len": 0}
    body["sampling_params"] = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    for server in both:
        server.flush()
    right, ours = (server.post("/generate", body).json() for server in both)
    assert any(answer["meta_info"]["num_retractions"] for answer in ours)
    for answer, alone in zip(ours, right, strict=True):
        assert answer["output_ids"] == alone["output_ids"]
        given, wanted = (each["meta_info"]["input_token_logprobs"] for each in (answer, alone))
        assert _values(given) == pytest.approx(_values(wanted), abs=1e-4)


def _values(rows: list[Any]) -> list[float]:
    """The logprobs of a list, or of a list of lists."""
    flat = (
        rows
        if rows and not isinstance(rows[0][0], list)
        else [each for row in rows for each in row]
    )
    return [each[0] for each in flat if each[0] is not None]
