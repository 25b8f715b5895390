"""LiLiCorr's state under the overlap scheduler, with requests that join and leave a batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from test.checkpoints import prompt
from test.formats import CASES, by_own_names, write
from test.v0_5_23.watched import answers_of, compare_drafts

pytestmark = pytest.mark.ci


def test_drafts_of_a_batch(small: Path, tmp_path: Path) -> None:
    """Prompts of one to many chunks. Some begin alike."""
    config, weights, semantics = CASES["LiLiCorr"]()
    shared = prompt(70, 24)
    prompts = [shared[: 6 * i] + prompt(71 + i, 3 + 9 * i) for i in range(6)]
    flags = ("--chunked-prefill-size", "16")
    answers = answers_of(small / "target", write(tmp_path, config, weights), prompts, *flags)
    model = Qwen3ForCausalLM.from_pretrained(small / "target", dtype=torch.float32).eval()
    own = by_own_names(weights)
    for ids, answer in zip(prompts, answers, strict=True):
        compare_drafts(answer, model, semantics, own, prompt=ids)
    steps = [step for answer in answers for step in answer["meta_info"]["spec_steps"]]
    assert max(step["num_requests"] for step in steps) > 1
