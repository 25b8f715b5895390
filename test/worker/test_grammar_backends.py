"""Grammar backends other than xgrammar, with drafts: each request has its answer alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.constrained import base_grammar_backend
from sglang.srt.constrained.base_grammar_backend import (
    BaseGrammarBackend,
    BaseGrammarObject,
    InvalidGrammarObject,
    register_grammar_backend,
)
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
from torch import Tensor

from sglang_dflash.tiny import DRAFT
from sglang_dflash.tiny.prompts import held_out
from test.checkpoints import write_with_added_tokens
from test.inprocess import InProcess
from test.servers import chat
from test.worker.conftest import Cut, Request, each_alone, facts, join

UNNAMED = 40  # ids of the target behind its tokenizer's
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Robert"]}, "age": {"enum": [7, 61, 3205]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASKED: dict[str, dict[str, Any]] = {
    "none, an unnamed id": {"logit_bias": {"2040": 50.0}, "max_new_tokens": 9, "ignore_eos": True},
    "regex": {"regex": r"(yes|no)[0-9]{3}"},
    "json": {"json_schema": json.dumps(SCHEMA)},
    "forced run": {"regex": r"The answer is the number one hundred and twenty-[a-z]{3,5}\."},
    "sampled": {"regex": r"[a-z ]{12}", "temperature": 0.9, "top_k": 1},
    "with eos ignored": {"regex": r"[0-9]{5}", "ignore_eos": True},
    "none": {},
    "none, logprobs": {"return_logprob": True, "top_logprobs_num": 2},
    "logprobs": {"regex": r"[0-9a-f]{9}", "return_logprob": True, "top_logprobs_num": 2},
    "penalties": {"regex": r"[ab]{9}", "frequency_penalty": 0.7},
}
WITH_RULES = [name for name in ASKED if not name.startswith("none")]


class Listed(BaseGrammarObject):
    """User code, as SGLang asks for it: no way back, and a mask of its own kind."""

    def __init__(self, allowed: list[list[int]]) -> None:
        super().__init__()
        self.allowed, self.accepted = allowed, 0

    def accept_token(self, token: int) -> None:
        if token not in self.allowed[self.accepted % len(self.allowed)]:
            raise ValueError(f"{token} was not allowed")
        self.accepted += 1

    def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device: Any) -> Tensor:
        return torch.zeros(batch_size, vocab_size, device=device)

    def fill_vocab_mask(self, vocab_mask: Tensor, idx: int) -> None:
        vocab_mask[idx].fill_(-float("inf"))
        vocab_mask[idx, self.allowed[self.accepted % len(self.allowed)]] = 0

    @staticmethod
    def move_vocab_mask(vocab_mask: Tensor, device: Any) -> Tensor:
        return vocab_mask.to(device)

    @staticmethod
    def apply_vocab_mask(logits: Tensor, vocab_mask: Tensor) -> None:
        logits.add_(vocab_mask)

    def copy(self) -> Listed:
        return Listed(self.allowed)


class Lists(BaseGrammarBackend):
    """Its regex is JSON: which tokens are allowed at each place, and then again."""

    def dispatch_regex(self, key_string: str) -> BaseGrammarObject:
        try:
            return Listed(json.loads(key_string))
        except ValueError as error:
            return InvalidGrammarObject(str(error))


def mine(_: Any, tokenizer: Any, vocab_size: int, eos: set[int]) -> BaseGrammarBackend:
    return XGrammarGrammarBackend(tokenizer, vocab_size, list(eos))


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bundled target, with ids that its tokenizer does not have."""
    folder = tmp_path_factory.mktemp("padded") / "target"
    return str(write_with_added_tokens(folder, (), UNNAMED))


@pytest.fixture
def registry() -> Iterator[None]:
    """Users' backends, for one test."""
    register_grammar_backend("lists", lambda *_: Lists())
    register_grammar_backend("mine", mine)
    yield
    base_grammar_backend.GRAMMAR_BACKEND_REGISTRY.clear()


def asked_of(target: str, options: list[dict[str, Any]]) -> list[Request]:
    """Requests with different prompts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    asked = []
    for given, example in zip(options, held_out("word", len(options)), strict=True):
        asked.append((tokenizer.encode(chat(example.prompt)), {"max_new_tokens": 40} | given))
    return asked


def serve(
    target: str, asked: list[Request], expected: list[dict[str, Any]], cuts: Cut, **flags: Any
) -> list[Any]:
    """Serve requests together. Any number of their drafts is right."""
    with InProcess(target, str(DRAFT), max_running_requests=16, **flags) as engine:
        cuts(engine)
        return join(engine, asked, expected)


@pytest.mark.parametrize("backend", ["outlines", "llguidance"])
def test_with_and_without_grammars(padded: str, backend: str, cuts: Cut) -> None:
    """A grammar masks the logits of its own request only."""
    flags: dict[str, Any] = {
        "grammar_backend": backend,
        "constrained_json_disable_any_whitespace": backend == "llguidance",
    }
    asked = asked_of(padded, list(ASKED.values()))
    expected = each_alone(padded, asked, **flags)
    reqs = dict(zip(ASKED, serve(padded, asked, expected, cuts, **flags), strict=True))
    for (name, req), answer in zip(reqs.items(), expected, strict=True):
        assert facts(req)["ids"] == answer["ids"], name
        assert facts(req)["reason"] == answer["reason"], name
    assert 2040 in reqs["none, an unnamed id"].output_ids
    assert len(set(reqs["with eos ignored"].output_ids[5:])) == 1  # the end token, again and again
    accepted = {name: reqs[name].spec_num_correct_drafts for name in WITH_RULES}
    if backend == "outlines":
        assert not any(accepted.values())
    else:
        assert accepted.pop("with eos ignored") == 0
        assert any(accepted.values())


@pytest.mark.usefixtures("registry")
def test_a_backend_of_a_user(padded: str, cuts: Cut) -> None:
    """Its grammars have no rollback, and a mask in floats."""
    lists = [[[5, 6, 7], [30]], [[100, 200]], [[9], [8], [7, 77]]]
    options: list[dict[str, Any]] = [{}, *({"regex": json.dumps(allowed)} for allowed in lists)]
    asked = asked_of(padded, [{"max_new_tokens": 12} | given for given in options])
    expected = each_alone(padded, asked, grammar_backend="lists")
    reqs = serve(padded, asked, expected, cuts, grammar_backend="lists")
    assert [facts(req) for req in reqs] == expected
    assert [req.spec_num_correct_drafts for req in reqs[1:]] == [0, 0, 0]
    assert reqs[0].spec_num_correct_drafts > 0


@pytest.mark.usefixtures("registry")
def test_a_backend_of_a_user_with_sglangs_grammars(padded: str, cuts: Cut) -> None:
    """Their drafts are accepted as those of xgrammar."""
    asked = asked_of(padded, [ASKED["regex"], ASKED["forced run"], {}])
    expected = each_alone(padded, asked, grammar_backend="mine")
    reqs = serve(padded, asked, expected, cuts, grammar_backend="mine")
    assert [facts(req) for req in reqs] == expected
    assert reqs[1].spec_num_correct_drafts > 0


def test_no_backend(padded: str, cuts: Cut) -> None:
    """A request with a grammar gets SGLang's refusal, and the others their answers."""
    asked = asked_of(padded, [{}, ASKED["regex"], {"ebnf": 'root ::= "a"'}])
    expected = each_alone(padded, asked, grammar_backend="none")
    reqs = serve(padded, asked, expected, cuts, grammar_backend="none")
    assert [facts(req) for req in reqs] == expected
    assert expected[1]["reason"]["status_code"] == 400


@pytest.mark.parametrize("backend", ["outlines", "llguidance"])
def test_a_reasoning_parser(tmp_path: Path, backend: str, cuts: Cut) -> None:
    """SGLang wraps grammars of xgrammar only; each of these gets its refusal."""
    target = str(write_with_added_tokens(tmp_path / "target", ["<think>", "</think>"]))
    flags = {"grammar_backend": backend, "reasoning_parser": "deepseek-r1"}
    thinking = {"require_reasoning": True}
    asked = asked_of(target, [ASKED["regex"] | thinking, {}, thinking, ASKED["json"]])
    expected = each_alone(target, asked, **flags)
    reqs = serve(target, asked, expected, cuts, **flags)
    assert [facts(req) for req in reqs] == expected
    reasons = [answer["reason"] for answer in expected]
    assert [reason.get("status_code") for reason in reasons] == [400, None, None, 400]
