"""Grammars on a GPU: one for every request, and backends whose masks are on the device."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.settings.options import DRAFT_AHEAD
from test.checkpoints import VOCAB, prompt, write_tokenizer
from test.rehearsal.device.memory import LOG
from test.rehearsal.serving import GRAMMAR, SHARED, Asked, N, answer, assert_drafts, engine, served

WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", "<|endoftext|>")
FIRST_WORD = 151  # behind the mask token
THINK_END = FIRST_WORD + 1
STRICT: dict[str, Any] = {"reasoning_parser": "qwen3", "enable_strict_thinking": True}

pytestmark = pytest.mark.ci


def budget(tokens: int) -> dict[str, Any]:
    return {"require_reasoning": True, "custom_params": {"thinking_budget": tokens}}


@pytest.fixture(scope="module")
def thinker(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small pair, with the words of Qwen 3 in its tokenizer."""
    folder = tmp_path_factory.mktemp("thinker")
    shutil.copytree(small / "target", folder / "target")
    (folder / "draft").symlink_to(small / "draft")
    special = {FIRST_WORD + i: text for i, text in enumerate(WORDS)}
    write_tokenizer(folder / "target", VOCAB, special)
    return folder


@pytest.mark.parametrize(
    ("backend", "page", "ahead"),
    [
        ("fa3", 1, "on"),
        pytest.param("flashinfer", 16, "off", marks=pytest.mark.ci),
        pytest.param("triton", 1, "on", marks=pytest.mark.full),
    ],
)
def test_strict_thinking(
    thinker: Path, monkeypatch: pytest.MonkeyPatch, backend: str, page: int, ahead: str
) -> None:
    """Every request has a grammar, and none drafts less for it."""
    monkeypatch.setenv(DRAFT_AHEAD, ahead)
    asked = {
        "no thinking": Asked(SHARED, N),
        "thinks for ever": Asked(prompt(970, 9), N | {"require_reasoning": True}),
        "a budget": Asked(prompt(971, 20), N | budget(5)),
        "a grammar": Asked(prompt(972, 10), GRAMMAR | budget(4)),
        "logprobs": Asked(SHARED, N | budget(3) | {"return_logprob": True, "top_logprobs_num": 2}),
        "radix": Asked(SHARED + prompt(973, 5), N | {"frequency_penalty": 0.7}),
    }
    reqs, drafts = served(
        thinker, answer(thinker, asked, **STRICT), backend, page_size=page, **STRICT
    )
    assert_drafts(thinker, reqs, drafts)
    assert reqs["a budget"].output_ids[5] == THINK_END
    for name, req in reqs.items():
        assert req.spec_num_correct_drafts > 0, name


def test_a_mask_on_the_device(small: Path) -> None:
    """outlines makes its mask on the device; its requests commit one token per step."""
    flags: dict[str, Any] = {"grammar_backend": "outlines"}
    regex = {"regex": "(t01[0-9]|t02[0-9]){8}", "max_new_tokens": 6}
    asked = {
        "none": Asked(SHARED, N),
        "one": Asked(prompt(974, 8), regex),
        "two": Asked(prompt(975, 8), regex | {"return_logprob": True}),
    }
    reqs, _ = served(small, answer(small, asked, **flags), "fa3", **flags)
    assert reqs["none"].spec_num_correct_drafts > 0
    assert reqs["one"].spec_num_correct_drafts == reqs["two"].spec_num_correct_drafts == 0


def one_step(folder: Path, options: dict[str, Any], **flags: Any) -> tuple[int, int, list[str]]:
    """Launches, copies and waits of a steady step of four requests."""
    with engine(folder, "fa3", cuda_graph_bs=[4], **flags) as run:
        for i in range(4):
            run.add(prompt(980 + i, 20), **N | {"max_new_tokens": 60} | options)
        for _ in range(5):
            run.step()
        LOG.clear()
        run.step()
        return len(LOG.launches), len(LOG.copies), list(LOG.waits)


def test_what_strict_thinking_costs(thinker: Path) -> None:
    """Nothing to requests that do not think. The others wait for their drafts, too."""
    launches, copies, waits = one_step(thinker, {})
    assert one_step(thinker, {}, **STRICT) == (launches, copies, waits)
    thoughts = one_step(thinker, {"require_reasoning": True}, **STRICT)
    drafts = "logits/rules.py:apply tolist"
    assert thoughts == (launches + 1, copies + 1, [drafts, *waits])
