"""The fixture of an oracle: what it drafts along the greedy output of a random target."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from test.checkpoints import prompt, write_target

FAMILIES = {  # the cases of `test.formats` that each oracle drafts
    "dspark": [
        "DeepSpec vanilla",
        "DeepSpec gated",
        "DeepSpec rnn",
        "DeepSpec DFlash",
        "DeepSpec DFlash with confidence",
    ],
    "domino": [
        "Domino",
        "Domino shifted",
        "Domino shifted, pure 1",
        "Domino pure 3, logit_head.",
    ],
    "dflash2": [  # z-lab's class always has both parts
        "DFlash 2",
        "DFlash 2 at the top level",
        "DFlash 2 sliding, cap, scale",
        "DFlash 2 cap, multiplier",
    ],
    "dspine": ["DSpine"],
    "jetspec": ["JetSpec"],
    "lilicorr": ["LiLiCorr", "LiLiCorr of the draft's width"],
    "dflash2_speculators": ["speculators DFlash 2", "speculators DFlash 2 from the anchor"],
}
PROMPT, TOKENS = prompt(41, 30), 40


def written(
    family: str,
    cases: list[str],
    draft: Callable[[Qwen3ForCausalLM, str, list[list[int]]], list[dict[str, Any]]],
) -> None:
    """Write what `draft(target, case, contexts)` drafts behind each token of the output."""
    with tempfile.TemporaryDirectory() as folder:
        write_target(Path(folder))
        target = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = list(PROMPT)
    for _ in range(TOKENS):
        ids.append(int(target(torch.tensor([ids])).logits[0, -1].argmax()))
    output = ids[len(PROMPT) :]
    contexts = [ids[: len(PROMPT) + i + 1] for i in range(TOKENS)]
    found = {"output": output, "cases": {case: draft(target, case, contexts) for case in cases}}
    place(family).write_text(json.dumps(found, separators=(",", ":")) + "\n")


def read(family: str) -> dict[str, Any]:
    """The fixture of a family."""
    found: dict[str, Any] = json.loads(place(family).read_text())
    return found


def place(family: str) -> Path:
    return Path(__file__).with_name(f"{family}.json")
