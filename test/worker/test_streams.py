"""Streams with parsers: any chunks give what chunks of one token give.

The serving, its parsers and the detokenizer are SGLang's. The tokens are a script's, because the
bundled target does not call tools.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.template_manager import TemplateManager
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.parser.reasoning_parser import ReasoningParser
from sglang.srt.server_args import PortArgs, ServerArgs
from transformers import AutoTokenizer

import test.inprocess  # noqa: F401, loads the plugins
from sglang_dflash.streams.detokenizer import Detokenizer
from sglang_dflash.tiny import DRAFT, TARGET
from test.answers import ANSWERS, CALLS, LEAD, TOOLS

TAG = re.compile(r"<[^<>\s]+>|\[TOOL_CALLS\]|｜DSML｜")
Sizes = Callable[[], int]


def of_one() -> int:
    return 1


class Script:
    """A tokenizer manager whose answers are given, in chunks of the given sizes."""

    def __init__(
        self, manager: Any, detokenizer: Any, text: str, sizes: Sizes, args: dict[str, Any]
    ):
        self._manager, self._detokenizer, self._sizes = manager, detokenizer, sizes
        self.server_args = SimpleNamespace(**vars(manager.server_args) | args)
        self._ids = manager.tokenizer.encode(text, add_special_tokens=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    async def generate_request(self, obj: Any, _: Any = None) -> AsyncIterator[dict[str, Any]]:
        """What SGLang's own sends for these tokens."""
        count = obj.sampling_params.get("n", 1)
        texts, sent = [""] * count, [0] * count
        while min(sent) < len(self._ids):
            for index in range(count):
                new = self._ids[sent[index] : sent[index] + self._sizes()]
                if new:
                    sent[index] += len(new)
                    yield self._chunk(obj, index, new, sent[index], texts)

    def _chunk(
        self, obj: Any, index: int, new: list[int], sent: int, texts: list[str]
    ) -> dict[str, Any]:
        finished = {"type": "stop", "matched": None} if sent == len(self._ids) else None
        first, around = sent == len(new), obj.input_ids[-5:]
        output = SimpleNamespace(
            rids=[f"{obj.rid}-{index}"],
            decoded_texts=[""],
            decode_ids=[around + new if first else new],
            read_offsets=[len(around)],
            finished_reasons=[finished],
            no_stop_trim=[False],
            skip_special_tokens=[obj.sampling_params.get("skip_special_tokens", True)],
            spaces_between_special_tokens=[True],
        )
        [text] = self._detokenizer._decode_batch_token_id_output(output)
        texts[index] += text
        incremental = self.server_args.incremental_streaming_output
        begin = sent - len(new) if incremental else 0
        logprobs = [(-0.5, token, str(i)) for i, token in enumerate(self._ids[begin:sent], begin)]
        top = [[entry, (-2.0, 7, f"other {entry[2]}")] for entry in logprobs]
        return {
            "text": text if incremental else texts[index],
            "output_ids": self._ids[begin:sent],
            "index": index,
            "meta_info": {
                "id": "answer",
                "finish_reason": finished,
                "prompt_tokens": len(obj.input_ids),
                "completion_tokens": sent,
                "reasoning_tokens": min(sent, 9),
                "cached_tokens": 0,
                "output_token_logprobs": logprobs,
                "output_top_logprobs": top,
                "output_token_logprobs_length": sent,
            },
        }


def new_managers() -> tuple[Any, Any]:
    """SGLang's tokenizer manager and our detokenizer, for the bundled target."""
    args = ServerArgs(
        model_path=str(TARGET),
        speculative_algorithm="DFLASH",
        speculative_draft_model_path=str(DRAFT),
    )
    ports = PortArgs.init_new(args)
    return TokenizerManager(args, ports), Detokenizer(args, ports)


@pytest.fixture(scope="module")
def managers() -> tuple[Any, Any]:
    return new_managers()


@dataclass
class Chat:
    """A streamed chat whose answer is given."""

    managers: tuple[Any, Any]
    answer: str
    args: dict[str, Any]  # of the server
    request: dict[str, Any]
    tags: bool = True  # whether each tag is one token, as in the models that write it
    tokenizer: Any = None  # None: the bundled target's

    def serving(
        self, sizes: Sizes, algorithm: str, api: type[OpenAIServingChat] = OpenAIServingChat
    ) -> Any:
        manager, detokenizer = self.managers
        tokenizer = self.tokenizer or AutoTokenizer.from_pretrained(str(TARGET))
        if self.tags and self.tokenizer is None:
            tokenizer.add_tokens(sorted(set(TAG.findall(self.answer))), special_tokens=True)
        manager.tokenizer = detokenizer.tokenizer = tokenizer
        templates = TemplateManager()
        templates.initialize_templates(manager, str(TARGET))
        args = {"tool_call_parser": None, "reasoning_parser": None} | self.args
        args["speculative_algorithm"] = algorithm
        return api(Script(manager, detokenizer, self.answer, sizes, args), templates)

    def stream(self, sizes: Sizes, algorithm: str = "DFLASH") -> list[dict[str, Any]]:
        """The events, without what changes from one stream to the next."""
        serving = self.serving(sizes, algorithm)
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": "Hello"}],
            "model": "default",
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        request = ChatCompletionRequest(**body | self.request)
        adapted, request = serving._convert_to_internal_request(request)
        *lines, done = gathered(serving._generate_chat_stream(adapted, request, None))
        assert done == "data: [DONE]\n\n"
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        for event in events:
            assert "error" not in event, event
            del event["created"]
            for choice in event["choices"]:
                for call in choice["delta"].get("tool_calls") or []:
                    call["id"] = call["id"] is not None
        return events

    def check(self, seeds: int = 5) -> list[dict[str, Any]]:
        """Any chunks give what SGLang gives for chunks of one token, which are returned."""
        expected = self.stream(of_one, algorithm="EAGLE")
        for seed in range(seeds):
            assert self.stream(random_sizes(seed)) == expected
        return expected


def gathered(stream: AsyncIterator[Any]) -> list[Any]:
    async def gather() -> list[Any]:
        return [part async for part in stream]

    return asyncio.run(gather())


def random_sizes(seed: int) -> Sizes:
    draw = random.Random(seed)
    return lambda: draw.randint(1, 16)


def joined(events: list[dict[str, Any]], what: str = "content") -> str:
    """The text of an answer."""
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    return "".join(delta.get(what) or "" for delta in deltas)


def calls(events: list[dict[str, Any]]) -> list[list[str]]:
    """The name and the arguments of each call."""
    found: list[list[str]] = []
    for event in events:
        for choice in event["choices"]:
            for call in choice["delta"].get("tool_calls") or []:
                if call["index"] == len(found):
                    found.append(["", ""])
                found[call["index"]][0] += call["function"]["name"] or ""
                found[call["index"]][1] += call["function"]["arguments"]
    return found


def test_answers_are_of_all_parsers() -> None:
    known = FunctionCallParser.ToolCallParserEnum
    assert {known[name] for name in ANSWERS} == set(known.values())


@pytest.mark.parametrize("tags", [True, False], ids=["tags are tokens", "tags are text"])
@pytest.mark.parametrize("parser", ANSWERS)
def test_tool_calls(managers: tuple[Any, Any], parser: str, tags: bool) -> None:
    args = {"tool_call_parser": parser}
    events = Chat(managers, ANSWERS[parser], args, {"tools": TOOLS}, tags).check()
    if tags:
        name, arguments = calls(events)[0]
        assert (name, json.loads(arguments)) == CALLS[0]


def test_sglang_needs_one_token_a_chunk(managers: tuple[Any, Any]) -> None:
    """Otherwise the tests here could not fail."""
    args = {"tool_call_parser": "deepseekv3"}
    chat = Chat(managers, ANSWERS["deepseekv3"], args, {"tools": TOOLS})
    wrong = chat.stream(random_sizes(0), algorithm="EAGLE")
    assert joined(wrong).strip() != LEAD.strip() or len(calls(wrong)) != len(CALLS)


@pytest.mark.parametrize("choice", ["required", {"function": {"name": "weather"}}], ids=str)
@pytest.mark.parametrize("parser", ["glm45", "qwen25"])  # calls as a JSON array, and its own format
def test_required_calls(managers: tuple[Any, Any], parser: str, choice: Any) -> None:
    array = [{"name": name, "parameters": arguments} for name, arguments in CALLS]
    answer = json.dumps(array, ensure_ascii=False) if parser == "glm45" else ANSWERS[parser]
    request = {"tools": TOOLS, "tool_choice": choice}
    events = Chat(managers, answer, {"tool_call_parser": parser}, request).check()
    name, arguments = calls(events)[0]
    assert (name, json.loads(arguments)) == CALLS[0]


@pytest.mark.parametrize("tags", [True, False], ids=["tags are tokens", "tags are text"])
@pytest.mark.parametrize("tools", [False, True], ids=["alone", "before tools"])
@pytest.mark.parametrize("parser", ReasoningParser.DetectorMap)
def test_reasoning(managers: tuple[Any, Any], parser: str, tools: bool, tags: bool) -> None:
    detector = ReasoningParser(parser).detector
    start, end = detector.think_start_token, detector.think_end_token
    answer = f"{start}\nHm, Zürich 🙂 or 北京? < 3{end}\n\n{ANSWERS['hermes']}"
    args = {"reasoning_parser": parser, "tool_call_parser": "hermes" if tools else None}
    Chat(managers, answer, args, {"tools": TOOLS} if tools else {}, tags).check(seeds=3)


@pytest.mark.parametrize("incremental", [False, True], ids=["whole", "incremental"])
@pytest.mark.parametrize("parser", [None, "qwen25"])
def test_logprobs_and_several_answers(
    managers: tuple[Any, Any], parser: str | None, incremental: bool
) -> None:
    args = {"tool_call_parser": parser, "incremental_streaming_output": incremental}
    request = {"n": 2, "logprobs": True, "top_logprobs": 2, "tools": TOOLS if parser else None}
    chat = Chat(managers, ANSWERS["qwen25"], args, request)
    expected = chat.stream(of_one)
    assert joined(expected)
    for seed in range(3):
        # The answers take turns, which is another order.
        assert by_answer(chat.stream(random_sizes(seed))) == by_answer(expected)
    tokens = [
        token["token"]
        for choice in by_answer(expected)[0]
        for token in (choice.get("logprobs") or {"content": []})["content"]
    ]
    assert tokens == [str(i) for i in range(len(tokens))]


def by_answer(events: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    for event in events:
        for choice in event["choices"]:
            found[choice["index"]].append(choice)
    return found


def test_anthropic(managers: tuple[Any, Any]) -> None:
    body: dict[str, Any] = {
        "model": "default",
        "max_tokens": 900,
        "stream": True,
        "messages": [{"role": "user", "content": "Hello"}],
        "tools": [
            {"name": function["name"], "input_schema": function["parameters"]}
            for function in (tool["function"] for tool in TOOLS)
        ],
    }
    args = {"tool_call_parser": "deepseekv3"}
    chat = Chat(managers, ANSWERS["deepseekv3"], args, {})

    def stream(sizes: Sizes, algorithm: str) -> list[Any]:
        serving = AnthropicServing(chat.serving(sizes, algorithm))
        request = serving._convert_to_chat_completion_request(AnthropicMessagesRequest(**body))
        adapted, request = serving.openai_serving_chat._convert_to_internal_request(request)
        of_anthropic = AnthropicMessagesRequest(**body)
        events = serving._generate_anthropic_stream(adapted, request, of_anthropic, None)
        return [re.sub(r"(msg|call|toolu)_\w+", "id", event) for event in gathered(events)]

    expected = stream(of_one, "EAGLE")
    assert sum("tool_use" in event for event in expected) >= len(CALLS)
    for seed in range(5):
        assert stream(random_sizes(seed), "DFLASH") == expected


def test_characters_are_sent_once(managers: tuple[Any, Any]) -> None:
    """SGLang's own detokenizer sends some twice."""
    manager, ours = managers
    manager.tokenizer = AutoTokenizer.from_pretrained(str(TARGET))
    text = "Zürich 🙂 北京</｜DSML｜>\n<｜DSML｜ 한국어 ▁▁ naïve 👩‍👩‍👧 हिन्दी 上海 🇨🇭x" * 3
    args = manager.server_args
    theirs = DetokenizerManager(args, PortArgs.init_new(args))
    params = {"skip_special_tokens": False, "n": 1}
    request = SimpleNamespace(rid="x", input_ids=[], sampling_params=params)

    def decoded(detokenizer: Any, seed: int) -> str:
        detokenizer.tokenizer = manager.tokenizer
        script = Script(manager, detokenizer, text, random_sizes(seed), {})
        return str(gathered(script.generate_request(request))[-1]["text"])

    assert [decoded(ours, seed) for seed in range(20)] == [text] * 20
    assert any(decoded(theirs, seed) != text for seed in range(20))
