"""Prompts, and the rules that judge their answers.

The bundled pair's own held-out prompts need no download. Public sets come from JSONL files, or from
a hub by `datasets`. docs/benchmarks.md documents the file format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dflash.tiny.prompts import KINDS, held_out
from training.data import final_answer

BOXED = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
PROGRAM = (
    "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\n{}\n```"
)


@dataclass(frozen=True)
class Prompt:
    workload: str
    text: str
    chat: bool = True  # one user turn; otherwise raw text to continue
    is_right: Callable[[str], bool] | None = None  # None: not judged


@dataclass(frozen=True)
class PublicSet:
    """A data set on the hub. `question` and `answer` are the names of its fields."""

    path: str
    name: str | None
    split: str
    question: str
    answer: str | None = None
    template: str = "{}"


PUBLIC = {
    "gsm8k": PublicSet("openai/gsm8k", "main", "test", "question", "answer", BOXED),
    "math500": PublicSet("HuggingFaceH4/MATH-500", None, "test", "problem", "answer", BOXED),
    "humaneval": PublicSet("openai/openai_humaneval", None, "test", "prompt", None, PROGRAM),
    "mbpp": PublicSet("google-research-datasets/mbpp", "sanitized", "test", "prompt"),
    "mt-bench": PublicSet("HuggingFaceH4/mt_bench_prompts", None, "train", "prompt"),
    "alpaca": PublicSet("tatsu-lab/alpaca", None, "train", "instruction"),
}


def bundled(kind: str, count: int, seed: int) -> list[Prompt]:
    """Held-out word problems (scored), JSON records (compared) or code to continue."""
    judges: dict[str, Callable[[Any], Callable[[str], bool]]]
    judges = {"word": _says_number, "json": _is_record}
    judge = judges.get(kind)
    return [
        Prompt(kind, e.prompt, kind != "code", judge(e.check) if judge else None)
        for e in held_out(kind, count, seed)
    ]


def load(source: str, count: int, seed: int) -> tuple[str, list[Prompt]]:
    """Name and prompts of "word", "json", "code", a public set's name, or NAME=FILE.jsonl."""
    name, _, file = source.partition("=")
    if not file and name in KINDS:
        try:
            return name, bundled(name, count, seed)
        except ValueError as error:  # more than exist
            raise SystemExit(str(error)) from None
    if file:
        lines = Path(file).read_text().splitlines()
        return name, [_prompt(name, json.loads(line)) for line in lines if line.strip()][:count]
    if name not in PUBLIC:
        raise SystemExit(f"No workload {name}: word, json, code, {', '.join(PUBLIC)}, NAME=FILE.")
    return name, [_prompt(name, row) for row in _from_hub(PUBLIC[name], count)]


def _from_hub(public: PublicSet, count: int) -> Iterable[dict[str, Any]]:
    from datasets import load_dataset

    rows = load_dataset(public.path, public.name, split=public.split)
    first: Iterable[dict[str, Any]] = rows.select(range(min(count, len(rows))))
    return first


def _prompt(name: str, row: dict[str, Any]) -> Prompt:
    """The prompt of a row. In a public set, the set's own field names are understood, too."""
    public = PUBLIC.get(name, PublicSet("", None, "", "prompt", "answer"))
    asked = next(row[key] for key in (public.question, "prompt", "turns") if key in row)
    text = asked[0] if isinstance(asked, list) else asked  # first turn of several
    expected = row.get(public.answer or "answer")
    judge = None if expected is None else _answers(str(expected))
    return Prompt(name, public.template.format(text), is_right=judge)


def _answers(expected: str) -> Callable[[str], bool]:
    _, marked, number = expected.rpartition("####")
    wanted = _final(number) if marked else expected.strip()
    return lambda text: _final(text) == wanted


def _final(text: str) -> str:
    """The content of the last \\boxed{}, else the last number, else the text."""
    _, boxed, tail = text.rpartition("\\boxed{")
    if boxed:
        depth = 1
        for i, letter in enumerate(tail):
            depth += {"{": 1, "}": -1}.get(letter, 0)
            if not depth:
                return tail[:i].replace(",", "").strip()
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return numbers[-1].replace(",", "") if numbers else text.strip()


def _says_number(number: int) -> Callable[[str], bool]:
    return lambda text: final_answer(text) == number


def _is_record(record: dict[str, Any]) -> Callable[[str], bool]:
    def is_right(text: str) -> bool:
        try:
            return bool(json.loads(text) == record)
        except json.JSONDecodeError:
            return False

    return is_right
