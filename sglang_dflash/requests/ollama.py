"""Ollama's endpoints answer a client's error with HTTP 400, as SGLang's other endpoints do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import StreamingResponse

from sglang_dflash.algorithm import is_dflash
from sglang_dflash.errors import Refusal


async def refuse_as_others(original: Any, serving: Any, *request: Any) -> Any:
    """AROUND `OllamaServing.handle_chat` and `.handle_generate`: a `ValueError` is the client's.

    A stream begins with its first chunk. SGLang begins it before it looks at the request.
    """
    if not is_dflash(serving.tokenizer_manager.server_args):
        return await original(serving, *request)
    try:
        response = await original(serving, *request)
        if isinstance(response, StreamingResponse):
            chunks = aiter(response.body_iterator)
            response.body_iterator = _behind(await anext(chunks), chunks)
    except Refusal:
        raise
    except ValueError as error:
        raise Refusal(str(error), "Correct the request.") from error
    return response


async def _behind(first: Any, chunks: AsyncIterator[Any]) -> AsyncIterator[Any]:
    yield first
    async for chunk in chunks:
        yield chunk
