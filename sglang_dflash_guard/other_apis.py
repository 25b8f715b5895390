"""Three APIs answer a client's error as SGLang's own do: Ollama's, Anthropic's, and Responses.

The error is a `ValueError`. SGLang answers with HTTP 500 there, or breaks a stream off.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from copy import copy
from typing import Any

from openai.types.responses import ResponseErrorEvent
from starlette.responses import Response, StreamingResponse

from sglang_dflash.errors import Refusal


async def refuse_ollama(original: Any, serving: Any, *request: Any) -> Any:
    """AROUND `OllamaServing.handle_chat` and `.handle_generate`."""
    try:
        return await _begun(await original(serving, *request))
    except Refusal:
        raise
    except ValueError as error:
        raise Refusal(str(error), "Correct the request.") from error


async def refuse_anthropic(original: Any, serving: Any, *request: Any) -> Any:
    """AROUND `AnthropicServing.handle_messages` and `.handle_count_tokens`.

    They hide what the chat API says. So they get a copy of it that notes what is wrong.
    """
    chat = serving.openai_serving_chat
    wrong: list[str] = []

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            try:
                return method(*args)
            except ValueError as error:
                wrong.append(str(error))
                raise

        return call

    async def handle(*chat_request: Any) -> Any:
        answer = await chat._handle_non_streaming_request(*chat_request)
        if isinstance(answer, Response) and answer.status_code == 400:
            wrong.append(json.loads(bytes(answer.body))["message"])
        return answer

    ours, noted = copy(serving), copy(chat)
    noted._convert_to_internal_request = noting(chat._convert_to_internal_request)
    noted._process_messages = noting(chat._process_messages)
    noted._handle_non_streaming_request = handle
    ours.openai_serving_chat = noted
    try:
        response = await _begun(await original(ours, *request))
    except ValueError as error:
        wrong.append(str(error))
    if wrong:
        return serving._error_response(400, "invalid_request_error", wrong[0])
    return response


async def end_with_an_error(
    original: Any, serving: Any, *args: Any, **kwargs: Any
) -> AsyncIterator[str]:
    """AROUND `OpenAIServingResponses.responses_stream_generator`: the last event names the error.

    SGLang has sent two events before it looks at the request.
    """
    sent = 0
    try:
        async for event in original(serving, *args, **kwargs):
            yield event
            sent += 1
    except ValueError as error:
        last = ResponseErrorEvent(
            type="error",
            code="invalid_request_error",
            message=str(error),
            param=None,
            sequence_number=sent,
        )
        yield f"event: error\ndata: {last.model_dump_json()}\n\n"


async def _begun(response: Any) -> Any:
    """The response, whose first chunk is made if it is a stream. May raise what this raises."""
    if isinstance(response, StreamingResponse):
        chunks = aiter(response.body_iterator)
        response.body_iterator = _behind(await anext(chunks), chunks)
    return response


async def _behind(first: Any, chunks: AsyncIterator[Any]) -> AsyncIterator[Any]:
    yield first
    async for chunk in chunks:
        yield chunk
