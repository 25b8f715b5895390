"""Grammars with drafts: legal drafts are accepted, and an illegal draft ends acceptance."""

from __future__ import annotations

import json
import random
from typing import Any, TypeAlias

import pytest

from sglang_dflash.adaptive.verify_width import FixedWidth
from sglang_dflash.tiny import DRAFT, TARGET
from sglang_dflash.tiny.prompts import held_out
from test.inprocess import InProcess
from test.servers import chat
from test.worker.conftest import Cut, facts, force

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<n>", "schema": {"type": "integer"}, "end": "</n>"}],
    "triggers": ["<n>"],
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "json": {"json_schema": json.dumps(SCHEMA)},
    "regex": {"regex": r"(yes|no)[0-9]{3}"},
    "forced run": {"regex": r"The answer is the number one hundred and twenty-[a-z]{3,5}\."},
    "ebnf": {"ebnf": 'root ::= "a" root "b" | "c"'},
    "structural_tag": {"structural_tag": json.dumps(TAG)},
    "with eos ignored": {"regex": r"[0-9]{5}", "ignore_eos": True},
    "none": {},
}
# By grammar: prompt, options and facts.
Answered: TypeAlias = dict[str, tuple[list[int], dict[str, Any], dict[str, Any]]]


@pytest.fixture(scope="module")
def asked() -> Answered:
    with InProcess(str(TARGET), disable_radix_cache=True) as engine:
        tokenizer = engine.scheduler.tokenizer
        found = {}
        examples = held_out("word", len(GRAMMARS))
        for (name, grammar), example in zip(GRAMMARS.items(), examples, strict=True):
            ids = tokenizer.encode(chat(example.prompt))
            options = {"max_new_tokens": 40, **grammar}
            req = engine.add(ids, **options)
            engine.run(req)
            found[name] = (ids, options, facts(req))
    return found


@pytest.mark.parametrize("accepting", ["real", "none", "all", "random"])
def test_all_grammars_in_one_batch(asked: Answered, accepting: str, cuts: Cut) -> None:
    """Requests with several grammars and with none run together, each with its own answer."""
    rng = random.Random(2)
    with InProcess(str(TARGET), str(DRAFT)) as engine:
        full = isinstance(engine.worker.verify_width, FixedWidth)
        forced = None
        if accepting != "real":
            counts = {
                "none": lambda _: 0,
                "all": lambda _: 15,
                "random": lambda _: rng.randint(0, 15),
            }
            forced = force(engine, counts[accepting])
        cuts(engine)
        reqs = {}
        for name, (ids, options, expected) in asked.items():
            reqs[name] = engine.add(ids, **options)
            if forced:
                forced.truth[reqs[name].rid] = expected["ids"]
        engine.run(*reqs.values())
        for name, req in reqs.items():
            assert facts(req) == asked[name][2], name
        if accepting == "all" and full:
            assert reqs["forced run"].spec_verify_ct <= 4


def test_grammar_ends_in_mid_block(asked: Answered) -> None:
    """A grammar that is complete inside a block ends the request there, as without drafts."""
    ids, options, expected = asked["regex"]
    with InProcess(str(TARGET), str(DRAFT)) as engine:
        forced = force(engine, lambda _: 15)
        req = engine.add(ids, **options)
        forced.truth[req.rid] = expected["ids"] + [5] * 20
        engine.run(req)
        assert facts(req) == expected
        assert req.spec_verify_ct == 1
