"""What a server of a small random pair answers, with the steps that it reports."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests

from test.reference import Semantics, draft_block
from test.servers import running

FLAGS = ("--max-total-tokens", "2048", "--max-running-requests", "4", "--skip-server-warmup")
PROMPT = random.Random(31).choices(range(5, 140), k=40)
TOKENS = 48  # SGLang reports the last 64 steps


def answer_of(
    target: Path, draft: Path, *flags: str, adapter: str | None = None, **options: Any
) -> dict[str, Any]:
    """options: sampling parameters of the request."""
    [answer] = answers_of(target, draft, [PROMPT], *flags, adapter=adapter, **options)
    return answer


def answers_of(
    target: Path,
    draft: Path,
    prompts: list[list[int]],
    *flags: str,
    adapter: str | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """The answers to several prompts, asked at once. options: sampling parameters of each."""
    pair = ("--model-path", str(target), "--speculative-draft-model-path", str(draft))
    sampling = {
        "temperature": 0,
        "max_new_tokens": TOKENS,
        "ignore_eos": True,
        "custom_params": {"spec_steps": True},
        **options,
    }
    body = {"sampling_params": sampling, "return_logprob": True, "lora_path": adapter}

    def ask(prompt: list[int]) -> dict[str, Any]:
        asked = body | {"input_ids": prompt}
        answered = requests.post(f"{server.url}/generate", json=asked, timeout=300)
        assert answered.status_code == 200, answered.text
        answer: dict[str, Any] = answered.json()
        return answer

    with running(*pair, *FLAGS, *flags, dflash=True) as server, ThreadPoolExecutor() as clients:
        return list(clients.map(ask, prompts))


def compare_drafts(
    answer: dict[str, Any],
    model: Any,
    semantics: Semantics,
    weights: dict[str, Any],
    window: tuple[int, int] | None = None,
    prompt: list[int] = PROMPT,
) -> None:
    """The drafts of each step are those of an independent reading; model: Transformers' target.

    window: the tokens that the draft sees, and the page at whose boundary they begin.
    """
    output, meta = answer["output_ids"], answer["meta_info"]
    steps = meta["spec_steps"]
    assert len(steps) == meta["spec_verify_ct"] > 5
    for step in steps:
        ids = prompt + output[: step["place"]]
        first = 0
        if window is not None:
            size, page = window
            first = max(0, len(ids) - 1 - size) // page * page
        wanted = draft_block(model, semantics, weights, ids, first=first)
        assert step["drafts"] == wanted[: len(step["drafts"])]
        assert len(wanted) - len(step["drafts"]) == semantics.sample_from_anchor
    ends = [step["place"] + step["num_committed"] for step in steps]
    assert [1, *ends] == [*(step["place"] for step in steps), TOKENS]
