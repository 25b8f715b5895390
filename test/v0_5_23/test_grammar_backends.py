"""Grammars that cannot go back over drafts, or not always: each answer as without speculation."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang_dflash.tiny.prompts import held_out
from test.servers import ALL_FEATURES, Client, chat, running

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Robert"]}, "age": {"enum": [7, 61, 3205]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASKED: list[dict[str, Any]] = [
    {"regex": r"(yes|no)[0-9]{3}"},
    {"regex": r"[0-9]{5}", "ignore_eos": True},
    {"json_schema": json.dumps(SCHEMA)},
    {"regex": r"The answer is the number one hundred and twenty-[a-z]{3,5}\."},
    {"regex": r"[a-z ]{12}", "temperature": 0.9, "sampling_seed": 7},
    {"regex": r"[ab]{9}", "frequency_penalty": 0.7},
    {},
    {"logit_bias": {"2040": 50.0}, "max_new_tokens": 9, "ignore_eos": True},  # no word has its id
]
PROMPTS = [chat(example.prompt) for example in held_out("word", len(ASKED))]


# After two digits only the end is left, and the least length forbids it: every token is forbidden.
# A grammar of llguidance refuses what is drawn then (HTTP 500), one of outlines does not.
IMPOSSIBLE = {"regex": "[0-9]{2}", "min_new_tokens": 10, "temperature": 1, "top_k": 5}


def said_to_the_impossible(client: Client) -> Any:
    sampling = IMPOSSIBLE | {"max_new_tokens": 30, "sampling_seed": 1}
    answer = client.post("/generate", {"text": "x", "sampling_params": sampling})
    return answer.status_code, answer.json().get("output_ids")


def said(client: Client, number: int) -> Any:
    answer = client.generate(PROMPTS[number], **{"max_new_tokens": 30} | ASKED[number])
    return answer["output_ids"], answer["meta_info"]["finish_reason"]


@pytest.mark.parametrize("backend", ["llguidance", "outlines"])
def test_grammar_backends(backend: str) -> None:
    flags = (*ALL_FEATURES, "--grammar-backend", backend)
    every = range(len(ASKED))
    with running(*flags, dflash=False) as plain:
        expected = [said(plain, number) for number in every]
        impossible = said_to_the_impossible(plain)
    with running(*flags, dflash=True) as server:
        assert [said(server, number) for number in every] == expected
        assert said_to_the_impossible(server) == impossible
        with ThreadPoolExecutor(len(ASKED)) as pool:
            together = list(pool.map(lambda number: said(server, number), [*every, *every]))
        assert together == expected * 2
