"""Output is counted once, by its request, wherever the request moves."""

from __future__ import annotations

import gc
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch

from sglang_dflash.logits.output_counts import OutputCounts
from sglang_dflash.method.block import Block
from sglang_dflash.step.sample import SamplingInput

VOCAB = 9


class Req:
    """As much of a request as counting reads."""

    def __init__(self) -> None:
        self.output_ids: list[int] = []
        self.ended = False
        self.sent = 0

    def finished(self) -> bool:
        return self.ended


def asked(reqs: list[Any], in_block: bool = True) -> SamplingInput:
    def output_of(req: Req, start: int) -> list[int]:
        tokens = req.output_ids[start : -1 if in_block else None]
        req.sent += len(tokens)
        return tokens

    zeros = torch.zeros(len(reqs), 2, dtype=torch.long)
    block = Block(zeros, zeros, zeros) if in_block else None
    info: Any = SimpleNamespace(device="cpu")
    return SamplingInput(reqs, torch.arange(len(reqs)), info, block, True, False, output_of)


def truth(output: list[int]) -> list[int]:
    counted = Counter(output)
    return [counted[token] for token in range(VOCAB)]


def test_a_batch_that_changes() -> None:
    """Requests come, grow, move, are retracted and finish. Each token is sent once."""
    rng = random.Random(3)
    counts = OutputCounts()
    running: list[Req] = []
    for _ in range(300):
        if len(running) < 6 and rng.random() < 0.4:
            new = [Req() for _ in range(rng.randint(1, 3))]
            assert counts.of(asked(new, in_block=False), VOCAB).sum() == 0
            for req in new:
                req.output_ids.append(rng.randrange(VOCAB))
            running += new
        if running and rng.random() < 0.1:  # a retraction: the prefill counts all of it anew
            req = rng.choice(running)
            del req.output_ids[rng.randint(0, len(req.output_ids)) :]
            req.sent = 0
            [row] = counts.of(asked([req], in_block=False), VOCAB).tolist()
            assert row == truth(req.output_ids)
            assert counts.length(req) == len(req.output_ids)
            req.output_ids.append(rng.randrange(VOCAB))
        if running and rng.random() < 0.3:
            running.pop(rng.randrange(len(running))).ended = rng.random() < 0.5
        rng.shuffle(running)
        if not running:
            continue
        for req, row in zip(running, counts.of(asked(running), VOCAB).tolist(), strict=True):
            assert row == truth(req.output_ids[:-1])
            assert req.sent == counts.length(req) == len(req.output_ids) - 1
            req.output_ids += [rng.randrange(VOCAB) for _ in range(rng.randint(1, 4))]


def test_a_request_that_finished_in_its_batch() -> None:
    """SGLang may process the last step after it has put a batch together."""
    counts, old, new = OutputCounts(), Req(), Req()
    old.output_ids = [1, 2]
    counts.of(asked([old]), VOCAB)
    old.ended = True
    table = counts.of(asked([old, new], in_block=False), VOCAB).tolist()
    assert table == [truth([1, 2]), truth([])]
    assert (counts.length(old), counts.length(new)) == (2, 0)


def test_rows_are_given_back() -> None:
    """By requests that finished, though something holds them, and by those that are gone."""
    counts = OutputCounts()
    held = []
    for turn in range(40):
        req = Req()
        counts.of(asked([req], in_block=False), VOCAB)
        if turn % 2:
            req.ended = True
            held.append(req)
        del req
        gc.collect()
    assert counts._table is not None
    assert len(counts._table) <= 2
