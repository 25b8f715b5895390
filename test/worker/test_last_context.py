"""LiLiCorr's state: the context of the token before each block, kept from step to step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3ForCausalLM

from sglang_dflash.method.block import Block
from sglang_dflash.settings.options import DRAFT_AHEAD
from test.checkpoints import prompt
from test.forced import put_drafter
from test.formats import CASES, by_own_names, write
from test.inprocess import InProcess
from test.reference import draft_block
from test.worker.conftest import Alone, Cut, Request, join

N: dict[str, Any] = {"max_new_tokens": 64, "ignore_eos": True}
SMALL = {1: 320, 16: 480}  # tokens of KV by page size; so few at 1 that requests are retracted


class Drafted:
    """Drafts as `inner` does, and lists each block with its request and its anchor's position."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.blocks: list[tuple[str, int, list[int]]] = []

    def propose(self, batch: Any, *where: Any) -> Block:
        block: Block = self.inner.propose(batch, *where)
        rows = zip(batch.reqs, block.positions.tolist(), block.token_ids.tolist(), strict=True)
        for req, positions, tokens in rows:
            self.blocks.append((req.rid, positions[0], tokens))
        return block


def requests() -> list[Request]:
    """Prompts of one to many chunks. Some begin alike, so that they hit the radix cache."""
    shared = prompt(70, 24)
    tails = [prompt(71 + i, 3 + 9 * i) for i in range(4)]
    return [(shared[: 6 * i] + tail, N) for i, tail in enumerate(tails)] + [([*shared, 7], N)]


@pytest.mark.parametrize("ahead", ["off", "on"])
@pytest.mark.parametrize("page", [1, 16])
def test_drafts_of_joining_requests(
    target: str,
    model: Qwen3ForCausalLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    alone: Alone,
    cuts: Cut,
    page: int,
    ahead: str,
) -> None:
    """With chunks, prefix hits, retractions, and any number of verified and accepted drafts."""
    monkeypatch.setenv(DRAFT_AHEAD, ahead)
    config, weights, semantics = CASES["LiLiCorr"]()
    asked, own = requests(), by_own_names(weights)
    answers = alone(asked)
    path = str(write(tmp_path, config, weights))
    flags = {"page_size": page, "max_total_tokens": SMALL[page], "chunked_prefill_size": 16}
    with InProcess(target, path, schedule_conservativeness=0.01, **flags) as engine:
        cuts(engine)
        drafted = Drafted(engine.worker.drafter)
        put_drafter(engine.worker, drafted)
        reqs = join(engine, asked, answers)
        assert page > 1 or sum(req.retraction_count for req in reqs) > 0
    compared = 0
    texts = {req.rid: req.origin_input_ids + req.output_ids for req in reqs}
    for rid, anchor, block in drafted.blocks:
        ids = texts[rid][: anchor + 1]
        if len(ids) == anchor + 1 and ids[-1] == block[0]:  # else behind the end of the answer
            assert block[1:] == draft_block(model, semantics, own, ids)
            compared += 1
    assert compared > 40
