"""The texts of watched steps, and the page's configuration."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from rich.text import Text
from transformers import AutoTokenizer

from sglang_dflash.report.shown_steps import ShownSteps, texts_of
from sglang_dflash.report.step_log import Step
from sglang_dflash.tiny import TARGET
from sglang_dflash.tools.chat import Token, styled
from sglang_dflash.watch.page import page

TEXT = 'def größe(x):\n    return "🦀 日本語", x  # done'


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TARGET)


def test_texts_join_to_the_text(tokenizer: Any) -> None:
    """Characters of several tokens, too."""
    ids = tokenizer(TEXT).input_ids
    assert any("\ufffd" in tokenizer.decode([token]) for token in ids)
    texts = texts_of(tokenizer, ids[:5], ids[5:])
    assert len(texts) == len(ids) - 5
    assert tokenizer.decode(ids[:5]).rstrip("\ufffd") + "".join(texts) == TEXT


class Stripping:
    """A decoder that drops the blank in front of a text, as that of Llama 2 does."""

    words = (" one", " two", " three")

    def batch_decode(self, prefixes: list[list[int]]) -> list[str]:
        return ["".join(self.words[i] for i in ids).removeprefix(" ") for ids in prefixes]


def test_blanks_between_tokens_are_kept() -> None:
    assert texts_of(Stripping(), [0], [1, 2]) == [" two", " three"]


def step(place: int, committed: int) -> Step:
    return Step([7] * 4, 4, committed - 1, committed, place, 1, 0.0)


def test_steps_that_never_came_and_prefills_between_steps(tokenizer: Any) -> None:
    """Tokens that no known step committed come in front of the next step."""
    answer = tokenizer(TEXT).input_ids
    shown = ShownSteps()
    shown.add([step(1, 2)], 1, answer, tokenizer)  # the prefill's token is in front
    shown.add([step(8, 3), step(12, 2)], 5, answer, tokenizer)  # two steps are lost
    assert list(shown.by_number) == [3, 4]
    all_of = ShownSteps()
    all_of.add([step(1, 2), step(8, 3), step(12, len(answer) - 12)], 3, answer, tokenizer)
    found = [each["text_before"] + "".join(each["texts"]) for each in all_of.by_number.values()]
    assert "".join(found) == TEXT


def test_no_texts_without_a_tokenizer() -> None:
    shown = ShownSteps()
    shown.add([step(1, 2)], 1, [1, 2, 3], None)
    assert "texts" not in shown.by_number[0]
    assert shown.by_number[0]["drafts"] == [7] * 4


def test_a_terminal_is_not_steered() -> None:
    assert styled(Token("a\x1b]52;c;x\x07b\n", 1)).plain == "a\ufffd]52;c;x\ufffdb\n"
    assert isinstance(styled(Token("a", 0)), Text)


def test_a_configuration_ends_no_script() -> None:
    html = page(["http://a/"], "http://b/", "</script><script>alert(1)</script>")
    [text] = re.findall(r'id="config">(.*?)</script>', html)
    found = json.loads(text)
    assert found["api_key"] == "</script><script>alert(1)</script>"
    assert (found["servers"], found["without"]) == (["http://a"], "http://b")
