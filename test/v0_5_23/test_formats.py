"""Every format and feature: the drafts that a server reports are those of an independent reading.

The cases are those of `test/worker/test_formats.py`. SGLang's own worker verifies as many positions
as the draft reads, so of a draft that predicts from the anchor, the last one is not verified.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from test.formats import CASES, by_own_names, write
from test.v0_5_23.watched import answer_of, compare_drafts

SOME = {
    "zlab sliding",
    "zlab causal",
    "zlab last layer",
    "zlab yarn by type",
    "JetSpec",
    "NeMo",
    "speculators sample_from_anchor",
    "speculators draft vocabulary",
    "speculators sliding not causal",
    "DeepSpec rnn",
    "Domino shifted, pure 1",
    "DFlash 2 sliding, cap, scale",
    "DSpine of Tencent",
    "LiLiCorr convolved, padded vocabulary",
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.ci if case in SOME else pytest.mark.full)
        for case in CASES
    ],
)
def test_drafts_equal_the_reference(case: str, small: Path, tmp_path: Path) -> None:
    config, weights, semantics = CASES[case]()
    answer = answer_of(small / "target", write(tmp_path, config, weights))
    model = Qwen3ForCausalLM.from_pretrained(small / "target", dtype=torch.float32).eval()
    compare_drafts(answer, model, semantics, by_own_names(weights))
