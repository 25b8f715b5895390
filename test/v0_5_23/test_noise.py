"""Drafts of a sampled request share the noise of the target's draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from sglang_dflash.method.noise import SHARES, gumbel
from test.formats import CASES, by_own_names, write
from test.reference import draft_block
from test.v0_5_23.watched import PROMPT, answer_of

SEED, VOCAB = 2**40 + 17, 200  # with 2**40 + 9, a difference of 8e-6 decided a draw
HEADS = [
    "zlab",
    "zlab sample_from_anchor",
    "DeepSpec rnn",
    "Domino",
    "DFlash 2",
    "DSpine",
    "LiLiCorr",
]


@pytest.mark.parametrize("case", HEADS)
@pytest.mark.parametrize("filters", [{}, {"top_k": 30, "top_p": 0.9}], ids=["plain", "filtered"])
def test_drafts_are_drawn_with_the_targets_noise(
    small: Path, tmp_path: Path, case: str, filters: dict[str, Any]
) -> None:
    config, weights, semantics = CASES[case]()
    draft = write(tmp_path, config, weights)
    sampled: dict[str, Any] = {"temperature": 0.9, "sampling_seed": SEED, **filters}
    answer = answer_of(small / "target", draft, **sampled)
    model = Qwen3ForCausalLM.from_pretrained(small / "target", dtype=torch.float32).eval()
    seen = set()
    for step in answer["meta_info"]["spec_steps"]:
        ids = PROMPT + answer["output_ids"][: step["place"]]
        positions = torch.arange(len(ids) - 1, len(ids) + 8)[:, None]
        noise = 0.9 * gumbel(torch.tensor([SEED]), positions, torch.arange(VOCAB))
        drafts = [
            draft_block(model, semantics, by_own_names(weights), ids, noise=share * noise)
            for share in SHARES
        ]
        drafts = [each[: len(step["drafts"])] for each in drafts]
        assert step["drafts"] in drafts
        seen.add(drafts.index(step["drafts"]))
    assert seen - {0}
