"""Harmony, the format of gpt-oss: any chunks give what chunks of one token give.

The tokens are those of gpt-oss. openai_harmony would download them, and a package brings them.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import Iterator
from copy import copy
from importlib.resources import files
from typing import Any

import pytest
from openai_harmony import HarmonyEncoding, HarmonyEncodingName, load_harmony_encoding
from sglang.srt.entrypoints.openai.protocol import ResponsesRequest
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from test.answers import CALLS, TOOLS
from test.worker.test_streams import (
    Chat,
    Sizes,
    calls,
    gathered,
    joined,
    new_managers,
    of_one,
    random_sizes,
)

SPECIAL = range(199998, 200019)
THOUGHT = "Hm, Zürich 🙂 or 北京? < 3"
SAID = "Let me look 👩‍👩‍👧.\n"
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "<|start|>assistant"
)
FINAL = "It is 🇨🇭 हिन्दी, fine."
DEEP = {"x": [1, {"y": None, "z": "a\"b\\c\n{'"}], "empty": {}}


def message(channel: str, text: str, end: str = "<|end|>") -> str:
    return f"<|start|>assistant<|channel|>{channel}<|message|>{text}{end}"


def call(name: str, arguments: Any) -> str:
    channel = f"commentary to=functions.{name} <|constrain|>json"
    return message(channel, json.dumps(arguments, ensure_ascii=False), "<|call|>")


# The prompt has the first `<|start|>assistant`.
THINKS = message("analysis", THOUGHT).removeprefix("<|start|>assistant")
ALL_CALLS = "".join(call(name, arguments) for name, arguments in CALLS)
ANSWERS = {
    "text": THINKS + message("final", FINAL, "<|return|>"),
    "calls": THINKS + ALL_CALLS + call("search", DEEP) + call("search", {}),
    "calls after text": THINKS + message("commentary", SAID) + ALL_CALLS,
    "all": THINKS + ALL_CALLS + message("final", FINAL, "<|return|>"),
    "ends while it thinks": THINKS[:40],
    "ends in a call": (THINKS + ALL_CALLS)[:-30],
}


@pytest.fixture(scope="module")
def encoding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HarmonyEncoding, str]]:
    """Harmony's tokens, and the file that has their ranks."""
    path = tmp_path_factory.mktemp("encodings") / "o200k_base.tiktoken"
    ranks = files("bpe_openai.data").joinpath("o200k_base.tiktoken.gz").read_bytes()
    path.write_bytes(gzip.decompress(ranks))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(path.parent))  # it checks the file's hash
        yield load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS), str(path)


@pytest.fixture(scope="module")
def managers(encoding: tuple[HarmonyEncoding, str]) -> tuple[Any, Any]:
    """As `new_managers`, and the model's type and tokenizer are those of gpt-oss."""
    harmony, ranks = encoding
    special = [harmony.decode([token]) for token in SPECIAL]
    converter = TikTokenConverter(ranks, extra_special_tokens=special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=converter.converted())
    tokenizer.chat_template = TEMPLATE
    manager, detokenizer = new_managers()
    manager.tokenizer = detokenizer.tokenizer = tokenizer
    manager.model_config.hf_config = copy(manager.model_config.hf_config)
    manager.model_config.hf_config.model_type = "gpt_oss"
    return manager, detokenizer


@pytest.mark.parametrize("incremental", [False, True], ids=["whole", "incremental"])
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_responses(managers: tuple[Any, Any], answer: str, incremental: bool) -> None:
    """SGLang's stream of `/v1/responses`, with harmony's own parser."""
    args = {"incremental_streaming_output": incremental}
    chat = Chat(managers, answer, args, {}, tokenizer=managers[0].tokenizer)

    def stream(sizes: Sizes, algorithm: str) -> list[str]:
        serving = chat.serving(sizes, algorithm, OpenAIServingResponses)
        request = ResponsesRequest(model="default", input="Hello", stream=True)
        events = gathered(asyncio.run(serving.create_responses(request)))
        changing = r'"(\w*id|call_id)":"\w+"|"created_at":\d+(\.\d+)?'
        return [re.sub(changing, r'"\1"', event) for event in events]

    expected = stream(of_one, "EAGLE")
    assert "response.reasoning_text.delta" in "".join(expected)
    assert stream(random_sizes(0), "EAGLE") != expected
    for seed in range(3):
        assert stream(random_sizes(seed), "DFLASH") == expected


@pytest.mark.parametrize("incremental", [False, True], ids=["whole", "incremental"])
@pytest.mark.parametrize("reasoning", [None, "gpt-oss"])
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_chat(
    managers: tuple[Any, Any], answer: str, reasoning: str | None, incremental: bool
) -> None:
    """The parsers of chats read Harmony as text."""
    args = {
        "tool_call_parser": "gpt-oss",
        "reasoning_parser": reasoning,
        "incremental_streaming_output": incremental,
    }
    request = {"tools": TOOLS}
    events = Chat(managers, answer, args, request, tokenizer=managers[0].tokenizer).check(seeds=3)
    if reasoning and answer is ANSWERS["text"]:
        assert joined(events, "reasoning_content") == THOUGHT
        assert joined(events) == FINAL
    if answer is ANSWERS["calls"]:
        found = [(name, json.loads(arguments)) for name, arguments in calls(events)]
        assert found == [*CALLS, ("search", DEEP), ("search", {})]
