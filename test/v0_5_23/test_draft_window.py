"""`--speculative-draft-window-size`: the draft sees only the last tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from test.formats import by_own_names, zlab
from test.v0_5_23.watched import answer_of, compare_drafts

WINDOW = 16


@pytest.mark.parametrize("page", [1, 4])
def test_draft_window(small: Path, page: int) -> None:
    _, weights, semantics = zlab()
    flags = ("--speculative-draft-window-size", str(WINDOW), "--page-size", str(page))
    answer = answer_of(small / "target", small / "draft", *flags)
    model = Qwen3ForCausalLM.from_pretrained(small / "target", dtype=torch.float32).eval()
    compare_drafts(answer, model, semantics, by_own_names(weights), (WINDOW, page))
    with pytest.raises(AssertionError):  # they differ from those of the whole context
        compare_drafts(answer, model, semantics, by_own_names(weights))
