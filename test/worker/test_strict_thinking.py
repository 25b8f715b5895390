"""Flags that give every request a grammar: `--enable-strict-thinking`, `--reasoning-parser`."""

from __future__ import annotations

import inspect
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest
import torch
from sglang.srt import constrained
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from transformers import AutoTokenizer

from sglang_dflash.tiny import DRAFT
from sglang_dflash.tiny.prompts import held_out
from test.checkpoints import write_with_added_tokens
from test.inprocess import InProcess
from test.servers import chat
from test.worker.conftest import Cut, Request, each_alone, facts, join

TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
THINK_END = 2045
IM_END = 2
STRICT: dict[str, Any] = {"reasoning_parser": "qwen3", "enable_strict_thinking": True}
REGEX: dict[str, Any] = {"regex": r"(yes|no)[0-9]{3}"}


def budget(tokens: int) -> dict[str, Any]:
    return {"require_reasoning": True, "custom_params": {"thinking_budget": tokens}}


ASKED: dict[str, dict[str, Any]] = {
    "no thinking": {},
    "thinks for ever": {"require_reasoning": True},
    "a budget": budget(5),
    "none at all": budget(0),
    "a budget, sampled": budget(19) | {"temperature": 0.9, "top_k": 1, "logit_bias": {"5": 1.0}},
    "an answer by a grammar": budget(6) | REGEX,
    "a grammar without thinking": REGEX,
    "ends itself": budget(30) | {"logit_bias": {str(THINK_END): 17.0}},
    "logprobs": budget(7) | {"return_logprob": True, "top_logprobs_num": 2},
}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bundled target with the special tokens of Qwen 3."""
    return str(write_with_added_tokens(tmp_path_factory.mktemp("thinks") / "target", TOKENS))


@pytest.fixture(scope="module")
def asked(thinker: str) -> list[Request]:
    tokenizer = AutoTokenizer.from_pretrained(thinker)
    requests = []
    for options, example in zip(ASKED.values(), held_out("word", len(ASKED)), strict=True):
        ids = tokenizer.encode(chat(example.prompt))
        requests.append((ids, {"max_new_tokens": 40} | options))
    return requests


@pytest.fixture(scope="module")
def expected(thinker: str, asked: list[Request]) -> list[dict[str, Any]]:
    return each_alone(thinker, asked, **STRICT)


@pytest.mark.parametrize("ahead", ["off", "on"])
def test_strict_thinking(
    thinker: str,
    asked: list[Request],
    expected: list[dict[str, Any]],
    cuts: Cut,
    ahead: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens that end an answer cannot come from a thought, and a budget ends the thought."""
    monkeypatch.setenv("SGLANG_DFLASH_DRAFT_AHEAD", ahead)
    with InProcess(thinker, str(DRAFT), max_running_requests=16, **STRICT) as engine:
        cuts(engine)
        reqs = dict(zip(ASKED, join(engine, asked, expected), strict=True))
    for (name, req), answer in zip(reqs.items(), expected, strict=True):
        assert facts(req)["ids"] == answer["ids"], name
        assert facts(req)["reason"] == answer["reason"], name
        assert req.spec_num_correct_drafts > 0 or name == "none at all", name
    assert IM_END not in reqs["thinks for ever"].output_ids
    assert reqs["a budget"].output_ids[5] == THINK_END
    assert reqs["none at all"].output_ids[0] == THINK_END
    assert len(reqs["an answer by a grammar"].output_ids) < 20


def test_thoughts_are_free_without_the_flag(thinker: str, asked: list[Request], cuts: Cut) -> None:
    """The grammar of a request that thinks begins behind its thought."""
    flags: dict[str, Any] = {"reasoning_parser": "qwen3"}
    long = {"max_new_tokens": 40}
    ends: dict[str, Any] = {"logit_bias": {str(THINK_END): 18.0}, "require_reasoning": True}
    kinds = [long | ends | REGEX, long | ends | REGEX, long | REGEX, long | ends]
    some = [(ids, kind) for (ids, _), kind in zip(asked, kinds, strict=False)]
    expected = each_alone(thinker, some, **flags)
    with InProcess(thinker, str(DRAFT), **flags) as engine:
        cuts(engine)
        reqs = join(engine, some, expected)
    assert [facts(req) for req in reqs] == expected
    assert THINK_END in reqs[0].output_ids


@pytest.mark.parametrize("page", [1, 4])
def test_the_cache_keeps_no_thoughts(thinker: str, asked: list[Request], page: int) -> None:
    """--strip-thinking-cache: a later turn hits what it hits without speculation, the prompt."""
    flags: dict[str, Any] = {"reasoning_parser": "qwen3", "page_size": page}
    seen = []
    for draft in (None, str(DRAFT)):
        with InProcess(thinker, draft, strip_thinking_cache=True, **flags) as engine:
            for (prompt, _), thinks in zip(asked, (True, False), strict=False):
                first = engine.add(prompt, require_reasoning=thinks, max_new_tokens=40)
                engine.run(first)
                second = engine.add([*prompt, *first.output_ids, *prompt], max_new_tokens=8)
                engine.run(second)
                hit = second.cached_tokens
                seen.append((list(first.output_ids), list(second.output_ids), hit))
                kept = len(prompt) if thinks else len(prompt) + len(first.output_ids)
                assert kept - page <= hit <= kept
    assert seen[:2] == seen[2:]


def owners_of_masks() -> list[type]:
    """The classes of SGLang's that apply masks."""
    owners = []
    for module in iter_modules(constrained.__path__, f"{constrained.__name__}."):
        for owner in vars(import_module(module.name)).values():
            mine = inspect.isclass(owner) and owner.__module__ == module.name
            abstract = owner is BaseGrammarObject
            if mine and not abstract and inspect.isroutine(vars(owner).get("apply_vocab_mask")):
                owners.append(owner)
    return owners


@pytest.mark.parametrize("owner", owners_of_masks(), ids=lambda owner: owner.__name__)
def test_masks_are_applied_on_a_cpu(owner: Any) -> None:
    """Grammars hand on the functions of their backends, too."""
    logits = torch.zeros(2, 64)
    mask = torch.tensor([[-2, -1], [5, 0]], dtype=torch.int32)
    if owner.__name__ == "OutlinesGrammar":
        bits = (mask[:, :, None] >> torch.arange(32)) & 1
        mask = bits.flatten(1) == 0
    apply = owner.apply_vocab_mask
    static = isinstance(vars(owner)["apply_vocab_mask"], staticmethod)
    apply(*(() if static else (None,)), logits=logits, vocab_mask=mask)
    allowed = [row.isfinite().nonzero().flatten().tolist() for row in logits]
    assert allowed == [list(range(1, 64)), [0, 2]]
