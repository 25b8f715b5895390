"""Drafts equal those of the families' own implementations, token by token, and so do confidences.

`test/oracles` holds the fixtures, and the scripts that wrote them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.method.block import Block
from sglang_dflash.settings.options import VERIFY_WIDTH
from test.forced import put_drafter
from test.formats import CASES, write
from test.inprocess import InProcess
from test.oracles.fixture import FAMILIES, PROMPT, TOKENS, read

CONFIDENCE_BOUND = 1e-4  # fp32 against fp32; a probability is served in steps of 2**-20
ALL = [(family, case, 1) for family, cases in FAMILIES.items() for case in cases]
FIRST = [(family, cases[0], 16) for family, cases in FAMILIES.items()]
FULL = [(family, case, 16) for family, case, _ in ALL if (family, case, 16) not in FIRST]
PAGES = [
    *ALL,
    *(pytest.param(*one, marks=pytest.mark.ci) for one in FIRST),
    *(pytest.param(*one, marks=pytest.mark.full) for one in FULL),
]


class Seen:
    """Drafts as `inner` does, and keeps the blocks by the position of their anchor."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.blocks: dict[int, Block] = {}

    def propose(self, batch: Any, *where: Any) -> Block:
        block: Block = self.inner.propose(batch, *where)
        self.blocks[int(block.positions[0, 0])] = block
        return block


@pytest.mark.parametrize(("family", "case", "page"), PAGES)
def test_drafts_equal_the_oracles(
    target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    case: str,
    page: int,
) -> None:
    monkeypatch.setenv(VERIFY_WIDTH, "auto")  # it asks for confidences
    config, weights, _ = CASES[case]()
    fixture = read(family)
    with InProcess(target, str(write(tmp_path, config, weights)), page_size=page) as engine:
        seen = Seen(engine.worker.drafter)
        put_drafter(engine.worker, seen)
        output = engine.generate(PROMPT, max_new_tokens=TOKENS, ignore_eos=True)
    assert output == fixture["output"]
    assert len(seen.blocks) > 10
    for position, block in seen.blocks.items():
        if position - len(PROMPT) >= TOKENS:  # behind the end of the output
            continue
        expected = fixture["cases"][case][position - len(PROMPT)]
        assert block.token_ids[0, 1:].tolist() == expected["drafts"]
        if expected["confidences"]:
            assert block.probabilities is not None
            given = block.probabilities[0].tolist()
            assert given == pytest.approx(expected["confidences"], abs=CONFIDENCE_BOUND)
