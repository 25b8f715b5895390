"""Two ranks whose roundings differ, on KV for a few requests."""

from __future__ import annotations

import time
from pathlib import Path

from sglang_dflash.tiny.prompts import held_out
from test.server.conftest import on
from test.server.test_serving import mixed_prompts, visible
from test.servers import TWO_RANKS, Client, chat

pytestmark = on(TWO_RANKS)
PROMPTS = [chat(example.prompt) for example in held_out("word", 3, seed=21)]


def test_small_pool_retracts_over_http(server: Client, reference: Client) -> None:
    """12 at once on KV for a few: some are retracted, all get the target's own tokens."""
    prompts = mixed_prompts()[:12]
    alone = reference.generate_many(prompts, max_new_tokens=100, ignore_eos=True)
    before = len(server.server.log.read_text())
    answers = server.generate_many(prompts, max_new_tokens=100, ignore_eos=True)
    server.flush()
    assert [visible(answer) for answer in answers] == [visible(answer) for answer in alone]
    assert "Retract requests" in server.server.log.read_text()[before:]


def test_ranks_that_round_differently_stay_together(
    server: Client, reference: Client, notes: Path
) -> None:
    """Near-ties fall otherwise on rank 1, yet both ranks draft, accept and commit the same."""
    begun = len(lines_of(notes, 0))
    expected = [reference.generate(prompt)["output_ids"] for prompt in PROMPTS]
    assert [answer["output_ids"] for answer in server.generate_many(PROMPTS)] == expected
    server.generate_many(PROMPTS, temperature=1.0)
    server.flush()
    deadline = time.monotonic() + 60  # rank 1 may still write
    while len(lines_of(notes, 0)) != len(lines_of(notes, 1)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(lines_of(notes, 0)) > begun + 20
    assert lines_of(notes, 0) == lines_of(notes, 1)


def lines_of(notes: Path, rank: int) -> list[str]:
    """What a rank has verified and committed so far."""
    return (notes / f"rank{rank}").read_text().splitlines()
