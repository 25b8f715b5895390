"""LoRA adapters: the draft reads the states of the target with the adapter.

Answers are compared by `test/server/test_differential.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from sglang_dflash.tools.launch import ServerFailed
from test.adapters import merged, vocabulary_of, write_adapter
from test.formats import by_own_names, zlab
from test.v0_5_23.watched import PROMPT, answer_of, compare_drafts


def test_drafts_read_the_adapted_target(small: Path, tmp_path: Path) -> None:
    _, weights, semantics = zlab()
    write_adapter(tmp_path, small / "target", rank=4, vocabulary=("embed_tokens",))
    flags = ("--lora-paths", f"one={tmp_path}")
    answer = answer_of(small / "target", small / "draft", *flags, adapter="one")
    base = Qwen3ForCausalLM.from_pretrained(small / "target", dtype=torch.float32).eval()
    own = by_own_names(weights) | vocabulary_of(base)
    compare_drafts(answer, merged(small / "target", tmp_path), semantics, own)
    greedy = base.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)
    assert answer["output_ids"][:8] != greedy[0, len(PROMPT) :].tolist()


def test_adapted_heads_are_refused(small: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path, small / "target", rank=2, vocabulary=("lm_head",))
    with pytest.raises(ServerFailed, match="LoRA adapters on lm_head are not served"):
        answer_of(small / "target", small / "draft", "--lora-paths", f"one={tmp_path}")
