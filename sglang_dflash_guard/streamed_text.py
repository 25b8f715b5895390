"""Streamed text of three APIs, which lose some of it: OpenAI's completions and responses, Ollama's.

With --incremental-streaming-output, each chunk of SGLang's tokenizer manager holds its new text
only. Completions and Ollama's streams cut what was sent off it, and a response is the last chunk.
Ollama's also drop the text of the last chunk: a token without speculation, and up to a block with
it. SGLang 0.5.23 has cured all but Ollama's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator
from copy import copy
from types import SimpleNamespace
from typing import Any

from sglang_dflash.seam import release


def of_completions(original: Any, serving: Any, *request: Any) -> Any:
    """AROUND `OpenAIServingCompletion._generate_completion_stream`."""
    if serving.tokenizer_manager.server_args.incremental_streaming_output:
        serving = _reading(serving, _texts_so_far)
    return original(serving, *request)


def of_ollama(original: Any, serving: Any, *request: Any) -> Any:
    """AROUND `OllamaServing._stream_chat_response` and `._stream_generate_response`."""
    return original(_reading(serving, _text_before_the_end), *request)


def of_responses(original: Any, context: Any, chunk: Any) -> None:
    """AROUND `SimpleContext.append_output`, which keeps the last chunk of a response."""
    before = context.last_output
    if before is not None and release.server_args().incremental_streaming_output:
        chunk = {**chunk, "text": before["text"] + chunk["text"]}
    original(context, chunk)


def _reading(serving: Any, stream: Any) -> Any:
    """A copy of an API that reads its answers from `stream(manager, request, raw_request)`."""
    manager = serving.tokenizer_manager

    def generate_request(obj: Any, raw_request: Any) -> AsyncIterator[dict[str, Any]]:
        answers: AsyncIterator[dict[str, Any]] = stream(manager, obj, raw_request)
        return answers

    ours = copy(serving)
    ours.tokenizer_manager = SimpleNamespace(
        server_args=manager.server_args, generate_request=generate_request
    )
    return ours


async def _texts_so_far(manager: Any, obj: Any, raw_request: Any) -> AsyncIterator[dict[str, Any]]:
    """Chunks with the whole text so far. Several answers are told apart by their index."""
    texts: defaultdict[int, str] = defaultdict(str)
    async for chunk in manager.generate_request(obj, raw_request):
        index = chunk.get("index", 0)
        texts[index] += chunk["text"]
        yield {**chunk, "text": texts[index]}


async def _text_before_the_end(
    manager: Any, obj: Any, raw_request: Any
) -> AsyncIterator[dict[str, Any]]:
    """The same, and the last text comes in a chunk before the one that says why it ended."""
    if manager.server_args.incremental_streaming_output:
        chunks = _texts_so_far(manager, obj, raw_request)
    else:
        chunks = manager.generate_request(obj, raw_request)
    async for chunk in chunks:
        meta = chunk["meta_info"]
        if meta["finish_reason"] is not None:
            yield {**chunk, "meta_info": {**meta, "finish_reason": None}}
        yield chunk
