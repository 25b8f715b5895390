"""Tests of the bundled pair as it is shipped: its files, its data, and its results."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

from sglang_dflash.checkpoint import read_draft
from sglang_dflash.checkpoint.fit import Target, defects, misfits
from sglang_dflash.tiny import DRAFT, TARGET
from sglang_dflash.tiny.prompts import KINDS, Example, held_out, pool
from test.inprocess import InProcess
from training import data
from training.rows import documents
from training.tokenizer import CHAT_TEMPLATE, chat_ids

pytestmark = pytest.mark.sglang


REPO = Path(__file__).parents[2]
WEIGHTS = (TARGET / "model.safetensors", DRAFT / "model.safetensors")
TOKENIZER = AutoTokenizer.from_pretrained(TARGET)
COUNT = 12  # held-out prompts of each kind


def test_weights_are_small_and_bf16() -> None:
    assert sum(file.stat().st_size for file in WEIGHTS) <= 16_000_000
    for file in WEIGHTS:
        with safe_open(file, framework="pt") as weights:
            kinds = {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
        assert kinds == {"BF16"}


def test_transformers_4_reads_the_target_right() -> None:
    """It does not know `rope_parameters`, and no tokenizer class of later versions."""
    config = json.loads((TARGET / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    tokenizer = json.loads((TARGET / "tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_draft_is_zlab_and_fits_the_target() -> None:
    draft, tensors = read_draft(DRAFT)
    config = AutoConfig.from_pretrained(TARGET)
    assert (draft.format, draft.block_size) == ("zlab", 16)
    assert config.head_dim == draft.head_dim == 128  # prebuilt GPU kernels serve it
    target = Target(str(TARGET), config.num_hidden_layers, config.hidden_size, config.vocab_size)
    assert misfits(draft, target) == []
    assert defects(draft, tensors, draft.block_size) == []


def test_the_target_has_the_recipes_chat_template() -> None:
    assert (TARGET / "chat_template.jinja").read_text() == CHAT_TEMPLATE.read_text()


def test_training_sees_no_held_out_prompt() -> None:
    """Compare the questions that training draws with the prompts that are kept for evaluation."""
    drawn = itertools.islice(documents(TOKENIZER, seed=0), 600)
    text = "".join(TOKENIZER.decode(ids) for ids, _ in drawn)
    asked = re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", text, re.DOTALL)
    assert len(asked) > 100
    assert not any(data.is_held_out(prompt) for prompt in asked)
    for kind in ("word", "json"):
        prompts = [example.prompt for example in pool(kind)]
        assert all(data.is_held_out(prompt) for prompt in prompts)
        assert not set(prompts) & set(asked)


def test_held_out_code_is_not_trained_on() -> None:
    """No held-out prompt occurs anywhere in the source that training reads."""
    trained = "\0".join(data.functions(held_out=False))
    examples = pool("code")
    assert len(examples) > 100
    assert not [e for e in examples if e.prompt in trained]


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_names_an_order(kind: str) -> None:
    """Seed 1 is the order of the file. Another seed gives another order of the same prompts."""
    everything = pool(kind)
    assert len({example.prompt for example in everything}) == len(everything)
    assert held_out(kind, 5, seed=1) == list(everything[:5])
    assert held_out(kind, 5, seed=2) == held_out(kind, 9, seed=2)[:5]
    assert held_out(kind, 5, seed=2) != held_out(kind, 5, seed=3)
    with pytest.raises(ValueError, match=f"only {len(everything)} exist"):
        held_out(kind, len(everything) + 1)


GOALS = {"word": 5.0, "json": 4.0, "code": 2.0}
Served: TypeAlias = dict[str, list[tuple[Example, Any]]]  # prompts and their finished requests


@pytest.fixture(scope="module")
def served() -> Served:
    """Held-out prompts of each kind with their finished requests, greedy, in fp32."""
    with InProcess(
        str(TARGET), str(DRAFT), max_total_tokens=8192, max_running_requests=COUNT
    ) as engine:
        found = {}
        for kind in GOALS:
            examples = held_out(kind, COUNT, seed=3)
            reqs = [engine.add(_ids(example), max_new_tokens=128) for example in examples]
            engine.run(*reqs)
            found[kind] = list(zip(examples, reqs, strict=True))
    return found


def _ids(example: Example) -> list[int]:
    if example.kind == "code":
        ids: list[int] = TOKENIZER.encode(example.prompt)
        return ids
    return chat_ids(TOKENIZER, example.prompt)


@pytest.mark.parametrize("kind", GOALS)
def test_accept_length(served: Served, kind: str) -> None:
    accepted = sum(req.spec_num_correct_drafts for _, req in served[kind])
    steps = sum(req.spec_verify_ct for _, req in served[kind])
    assert (accepted + steps) / steps >= GOALS[kind]


def test_word_problems_are_solved(served: Served) -> None:
    """The goal is 90 %. Of these few, two may be wrong. Every answer ends with the target's EOS."""
    said = [(TOKENIZER.decode(req.output_ids), example) for example, req in served["word"]]
    right = [data.final_answer(text) == example.check for text, example in said]
    assert sum(right) >= COUNT - 2, [text for text, _ in said]
    ends = [req.finished_reason.to_json() for _, req in served["word"]]
    assert ends == [{"type": "stop", "matched": TOKENIZER.eos_token_id}] * COUNT
