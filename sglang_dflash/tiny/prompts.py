"""Held-out prompts of the bundled pair: none of them occurs in the text that trained it.

`prompts.jsonl` has one JSON object per line, with the fields of `Example`.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

PROMPTS = Path(__file__).parent / "prompts.jsonl"
KINDS = ("word", "json", "code")
IN_ORDER = 1  # the seed that takes the prompts in the order of the file


@dataclass(frozen=True)
class Example:
    """One prompt with the answer that the target is taught."""

    kind: str  # one of KINDS
    prompt: str  # user message ("word", "json") or raw text to continue ("code")
    answer: str  # empty for "code" of the file, which is not judged
    check: Any = None  # "word": the number, int; "json": the record, dict


@cache
def pool(kind: str) -> tuple[Example, ...]:
    """All held-out prompts of a kind, in the order of the file."""
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    examples = [Example(**json.loads(line)) for line in lines]
    return tuple(example for example in examples if example.kind == kind)


def held_out(kind: str, count: int, seed: int = 0) -> list[Example]:
    """The first `count` held-out prompts of a kind, in the order that the seed names.

    Published results use seed 1, the order of the file.
    """
    examples = list(pool(kind))
    if count > len(examples):
        raise ValueError(f"{count} held-out prompts of kind {kind}: only {len(examples)} exist.")
    if seed != IN_ORDER:
        random.Random(f"{kind}-{seed}").shuffle(examples)
    return examples[:count]
