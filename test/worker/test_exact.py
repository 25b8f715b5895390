"""With any acceptance the output is the target's: page sizes, caches, chunks, finish reasons."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any, TypeAlias

import pytest

from test.checkpoints import prompt, word
from test.forced import Forced
from test.inprocess import InProcess
from test.precision import LOGPROB_BOUND
from test.worker.conftest import Alone, Request, facts, force

LONG = {"max_new_tokens": 60, "ignore_eos": True}


def requests(count: int, longest: int = 70) -> list[Request]:
    rng = random.Random(7)
    return [
        (
            prompt(i, rng.randint(1, longest)),
            {"max_new_tokens": rng.randint(1, 60), "ignore_eos": True},
        )
        for i in range(count)
    ]


FLAGS: list[dict[str, Any]] = [
    {},
    {"page_size": 16},
    {"page_size": 4, "chunked_prefill_size": 4},
    {"page_size": 256, "disable_radix_cache": True},
    {"disable_radix_cache": True, "chunked_prefill_size": 7},
    {"speculative_num_draft_tokens": 3},
    {"speculative_dflash_block_size": 2, "page_size": 16},
]


@pytest.mark.parametrize(
    ("accepting", "flags"),
    [
        pytest.param(
            accepting, flags, marks=pytest.mark.ci if flags and accepting != "random" else ()
        )
        for accepting, flags in itertools.product(["none", "all", "random"], FLAGS)
    ],
    ids=str,
)
def test_equals_target(
    target: str, draft: str, alone: Alone, flags: dict[str, Any], accepting: str
) -> None:
    """Many at once; the strict memory check runs after every step."""
    asked = requests(12)
    expected = alone(asked)
    rng = random.Random(3)
    with InProcess(target, draft, **flags) as engine:
        block = engine.server_args.speculative_num_draft_tokens
        counts = {
            "none": lambda _: 0,
            "all": lambda _: block,
            "random": lambda _: rng.randint(0, block),
        }
        forced = force(engine, counts[accepting])
        free = engine.allocator.available_size()
        reqs = []
        for (ids, options), answer in zip(asked, expected, strict=True):
            req = engine.add(ids, **options)
            forced.truth[req.rid] = answer["ids"]
            reqs.append(req)
            engine.step()
            batch = engine.scheduler.running_batch
            if not batch.is_empty():
                running = [i for i, req in enumerate(batch.reqs) if not req.finished()]
                lens = [
                    len(batch.reqs[i].origin_input_ids + batch.reqs[i].output_ids) - 1
                    for i in running
                ]
                assert batch.seq_lens[running].tolist() == lens
                assert batch.orig_seq_lens[running].tolist() == lens
                assert batch.seq_lens_cpu[running].tolist() == lens
        engine.run(*reqs)
        assert [facts(req) for req in reqs] == expected
        engine.scheduler.flush_cache()
        assert engine.allocator.available_size() == free
        assert len(engine.rows.free_slots) == engine.rows.size


WAYS = ("length", "eos", "stop_token", "stop_string", "stop_regex")
PROMPT = prompt(101, 20)
# By way and offset: options and facts.
Cases: TypeAlias = dict[tuple[str, int], tuple[dict[str, Any], dict[str, Any]]]
Finish: TypeAlias = tuple[InProcess, Forced, list[int], Cases]


def finishing(way: str, token: int, cut: int) -> dict[str, Any]:
    """Options with which the request ends at its output token number `cut`."""
    text = word(token)
    ways: dict[str, dict[str, Any]] = {
        "length": {"max_new_tokens": cut + 1, "ignore_eos": True},
        "eos": {"max_new_tokens": 40, "eos": token},
        "stop_token": {"max_new_tokens": 40, "stop_token_ids": [token]},
        "stop_string": {"max_new_tokens": 40, "stop": [text]},
        "stop_regex": {"max_new_tokens": 40, "stop_regex": [text]},
    }
    return ways[way] | {"return_logprob": True}


@pytest.fixture(scope="module")
def finish(target: str, draft: str, alone: Alone) -> Iterator[Finish]:
    """An engine whose drafts are all right, and options and expected facts by (way, offset)."""
    [full] = alone([(PROMPT, LONG)])
    asked = {
        (way, offset): finishing(way, full["ids"][1 + offset], 1 + offset)
        for way, offset in itertools.product(WAYS, range(9))
    }
    answers = alone([(PROMPT, options) for options in asked.values()])
    cases = {case: (asked[case], answer) for case, answer in zip(asked, answers, strict=True)}
    with InProcess(target, draft) as engine:
        yield engine, force(engine, lambda _: 7), full["ids"], cases


@pytest.mark.parametrize("offset", range(9))
@pytest.mark.parametrize("way", WAYS)
def test_finish_at_every_offset(finish: Finish, way: str, offset: int) -> None:
    """Finishing inside a block gives the text, reason and counts of one-token decoding."""
    engine, forced, truth, cases = finish
    options, expected = cases[way, offset]
    req = engine.add(PROMPT, **options)
    forced.truth[req.rid] = truth
    engine.run(req)
    got = facts(req)
    assert got["logprobs"] == pytest.approx(expected["logprobs"], abs=LOGPROB_BOUND)
    assert {**got, "logprobs": None} == {**expected, "logprobs": None}
    assert sum(req.spec_correct_drafts_histogram) == req.spec_verify_ct
    accepted = sum(k * n for k, n in enumerate(req.spec_correct_drafts_histogram))
    assert accepted == req.spec_num_correct_drafts
