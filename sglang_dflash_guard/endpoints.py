"""Bodies of other endpoints than those for text: SGLang answers some of them with HTTP 500.

Each check belongs to one handler of SGLang and refuses what this handler cannot answer. An error
that no check foresees stays HTTP 500.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from pydantic import TypeAdapter, ValidationError
from sglang.srt.entrypoints.openai.protocol import ResponsesRequest
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.managers.io_struct import (
    AddExternalCorpusReqInput,
    GenerateReqInput,
    RemoveExternalCorpusReqInput,
)
from sglang.srt.managers.load_snapshot import LoadSnapshot
from sglang.srt.parser.reasoning_parser import ReasoningParser

from sglang_dflash.errors import Refusal, shown
from sglang_dflash.seam import release

Query = Mapping[str, str]
Check = Callable[[Any, Query], None]  # of the parsed body (None: there is none) and of the query
LOG_LEVELS_OF_REQUESTS = range(4)


def one_of(field: str, value: Any, allowed: Any) -> None:
    """Raise `Refusal` for a value of a field that is not among those that are allowed."""
    if value not in allowed:
        raise Refusal(
            f"{field} is {shown(value)}.", f"It must be one of {', '.join(map(str, allowed))}."
        )


def typed(kind: Any) -> Check:
    """A check of the body by the type that the handler makes of it."""
    adapter = TypeAdapter(kind)

    def check(body: Any, query: Query) -> None:
        try:
            adapter.validate_python(body)
        except ValidationError as error:
            # Of a struct, pydantic first says that the body is none.
            first = next(each for each in error.errors() if each["type"] != "is_instance_of")
            parts = [str(part) for part in first["loc"] if not str(part).startswith("function-")]
            field = ".".join(parts) or "The body"
            raise Refusal(f"{field} is wrong: {first['msg']}.", "Correct it.") from None

    return check


def parser_of_calls(body: Any, query: Query) -> None:
    """SGLang's comment promises that it tries all parsers without a name. It raises."""
    name = _object(body).get("tool_call_parser")
    one_of("tool_call_parser", name, sorted(FunctionCallParser.ToolCallParserEnum))


def parser_of_reasoning(body: Any, query: Query) -> None:
    """SGLang answers an unknown name with HTTP 500."""
    name = _object(body).get("reasoning_parser")
    if isinstance(name, str):  # else FastAPI refuses it
        one_of("reasoning_parser", name.lower(), sorted(ReasoningParser.DetectorMap))


def parameters_of_vertex(body: Any, query: Query) -> None:
    """SGLang passes them as keyword arguments of a request, beside those that the body fills."""
    given = _object(body).get("parameters")
    allowed = {field.name for field in fields(GenerateReqInput)} - {"image_data"}
    instances = _object(body).get("instances")
    first = instances[0] if isinstance(instances, list) and instances else None
    for name in ("text", "input_ids", "input_embeds"):
        if _object(first).get(name):
            allowed.remove(name)
            break
    for name in _object(given):
        if name not in allowed:
            raise Refusal(f"parameters has {shown(name)}.", "Leave it out.")


def tokens(body: Any, query: Query) -> None:
    """Tokenizers count tokens in 32 bits."""
    given = _object(body).get("tokens")
    for row in given if isinstance(given, list) else ():
        for token in row if isinstance(row, list) else [row]:
            if isinstance(token, int) and not 0 <= token < 2**32:
                raise Refusal(
                    f"tokens has {shown(token)}.", "It must be a whole number of 32 bits."
                )


def messages(body: Any, query: Query) -> None:
    """SGLang answers an empty list of messages with HTTP 500."""
    if _object(body).get("messages") == []:
        raise Refusal("messages is empty.", "Give one message at least.")


def openai(body: Any, query: Query) -> None:
    """SGLang's validators of these fields raise other errors than pydantic expects."""
    given = _object(body)
    form = given.get("response_format")
    if form is not None and not isinstance(form, Mapping):
        raise Refusal(f"response_format is {shown(form)}.", "It must be an object.")
    for name in ("extra_key", "cache_salt"):
        if given.get(name) and not isinstance(given[name], str):
            raise Refusal(f"{name} is {shown(given[name])}.", "It must be text.")


def text(body: Any, query: Query) -> None:
    """Without a tokenizer, SGLang answers requests for text with HTTP 500."""
    raise Refusal(
        "This server has no tokenizer, because it was started with --skip-tokenizer-init.",
        "Send input_ids to /generate.",
    )


def sections(body: Any, query: Query) -> None:
    """SGLang answers an unknown section of `/v1/loads` with HTTP 500."""
    for name in query["include"].split(",") if query.get("include") else ():
        one_of("include", name.strip(), sorted(LoadSnapshot.VALID_SECTIONS))


def logging_of_requests(body: Any, query: Query) -> None:
    """SGLang answers an unknown level with HTTP 500."""
    level, of_requests = _object(body).get("log_level"), _object(body).get("log_requests_level")
    if isinstance(level, str):
        one_of("log_level", level.upper(), sorted(logging.getLevelNamesMapping()))
    if of_requests is not None:
        one_of("log_requests_level", of_requests, LOG_LEVELS_OF_REQUESTS)


def _object(value: Any) -> Mapping[str, Any]:
    """The value if it is an object, else an empty one: FastAPI refuses it by its own rules."""
    return value if isinstance(value, Mapping) else {}


ENDPOINT_CHECKS: dict[str, Check] = {  # by the name of SGLang's handler
    "add_external_corpus": typed(AddExternalCorpusReqInput),
    "anthropic_v1_count_tokens": messages,
    "configure_logging": logging_of_requests,
    "get_loads": sections,
    "ollama_chat": messages,
    "openai_v1_chat_completions": openai,
    "openai_v1_completions": openai,
    "openai_v1_detokenize": tokens,
    "parse_function_call_request": parser_of_calls,
    "remove_external_corpus": typed(RemoveExternalCorpusReqInput),
    "sagemaker_chat_completions": openai,
    "separate_reasoning_request": parser_of_reasoning,
    "v1_responses_request": typed(ResponsesRequest),
    "vertex_generate": parameters_of_vertex,
}
OF_TEXT = {
    *("openai_v1_completions", "openai_v1_chat_completions", "sagemaker_chat_completions"),
    *("openai_v1_tokenize", "openai_v1_detokenize", "v1_responses_request", "v1_rerank_request"),
    *("anthropic_v1_messages", "anthropic_v1_count_tokens", "ollama_chat", "ollama_generate"),
}


def check_of(handler: str) -> Check | None:
    """The check of a handler of SGLang in a server that runs; None: it needs none."""
    if handler in OF_TEXT and release.server_args().skip_tokenizer_init:
        return text
    return ENDPOINT_CHECKS.get(handler)
