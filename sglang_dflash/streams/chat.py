"""Streams that SGLang's parsers read: they get one token a chunk, as without speculation.

SGLang's parsers of tool calls, of reasoning and of Harmony expect the text of one token. They lose
text and arguments where a chunk holds several, and a block brings several. So does
`--stream-interval`. Here such a stream is cut at its tokens before anything reads it. The parsers,
logprobs and usage then see what they see without speculation.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from copy import copy
from typing import Any

from sglang.srt.entrypoints.openai.sse_utils import build_sse_content
from sglang.srt.entrypoints.openai.usage_processor import UsageProcessor
from sglang.srt.managers.schedule_batch import INIT_INCREMENTAL_DETOKENIZATION_OFFSET
from sglang.srt.utils.patch_tokenizer import decode_without_hf_kwargs
from sglang.utils import find_printable_text

from sglang_dflash.seam import release

OF_TOKENS = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")


async def chat_stream(
    original: Any, serving: Any, adapted: Any, request: Any, *args: Any
) -> AsyncIterator[str]:
    """AROUND `OpenAIServingChat._generate_chat_stream`, which Anthropic's API uses, too.

    Streams without a parser stay as they are: an event for a block costs less than one for a token.
    """
    parses_tools = serving.tool_call_parser and request.tools and request.tool_choice != "none"
    parses_reasoning = serving.reasoning_parser and request.separate_reasoning
    # SGLang gives all tokens of a chunk the top logprobs of the first.
    if parses_tools or parses_reasoning or request.logprobs:
        serving = _cut_at_tokens(serving)
    async for event in original(serving, adapted, request, *args):
        yield event


async def chunks_of_a_stream(
    original: Any, serving: Any, *, choice_logprobs: Any = None, **chat: Any
) -> AsyncIterator[str]:
    """AROUND `OpenAIServingChat._generate_stream_content`: the logprobs of every token are sent.

    SGLang drops them with reasoning, with chunks of a tool parser, and where the new tokens add no
    text, as where a stop string is cut off.
    """
    unsent = choice_logprobs is not None
    async for chunk in original(serving, choice_logprobs=choice_logprobs, **chat):
        unsent = unsent and not _has_logprobs(chunk)
        yield chunk
    if unsent:
        yield build_sse_content(
            chunk_id=chat["content"]["meta_info"]["id"],
            created=int(time.time()),
            model=chat["request"].model,
            index=chat["index"],
            content="",
            logprobs=choice_logprobs,
            usage=_usage(serving, chat) if chat["continuous_usage_stats"] else None,
        )


def _has_logprobs(chunk: str) -> bool:
    """Whether an event of a streamed chat holds logprobs."""
    event = json.loads(chunk.removeprefix("data: "))
    return any(choice.get("logprobs") is not None for choice in event["choices"])


def _usage(serving: Any, chat: dict[str, Any]) -> Any:
    """The usage of a choice so far, as SGLang's own chunks have it."""
    counts = ("prompt_tokens", "reasoning_tokens", "completion_tokens")
    so_far = {name: chat[name].get(chat["index"], 0) for name in counts}
    if not release.has_own_scheduler_step():
        so_far["cached_tokens"] = serving._continuous_usage_cached_details(chat["content"])
    return UsageProcessor.calculate_token_usage(**so_far).model_dump()


async def harmony_stream(
    original: Any, serving: Any, *args: Any, **kwargs: Any
) -> AsyncIterator[Any]:
    """AROUND `OpenAIServingResponses._generate_with_builtin_tools`.

    Of a chunk, the stream of `/v1/responses` sends the text of the last token.
    """
    if serving.use_harmony:
        serving = _cut_at_tokens(serving)
    async for context in original(serving, *args, **kwargs):
        yield context


def _cut_at_tokens(serving: Any) -> Any:
    """A copy of an endpoint whose streams are cut."""
    ours = copy(serving)
    ours.tokenizer_manager = OneTokenChunks(serving.tokenizer_manager)
    return ours


class OneTokenChunks:
    """A `TokenizerManager` whose streams bring one token a chunk."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    async def generate_request(self, obj: Any, *args: Any) -> AsyncIterator[dict[str, Any]]:
        """As `TokenizerManager.generate_request`, for one prompt, which may have `n` answers."""
        prompt, params = list(obj.input_ids or []), obj.sampling_params or {}
        answers: dict[int, AnswerSoFar] = {}
        chunks = self._manager.generate_request(obj, *args)
        async with aclosing(chunks):
            async for chunk in chunks:
                if not obj.stream:
                    yield chunk
                    continue
                index = chunk.get("index", 0)
                if index not in answers:
                    answers[index] = AnswerSoFar(self._manager, prompt, params)
                for part in answers[index].cut(chunk):
                    yield part


class AnswerSoFar:
    """What a stream has brought of one answer."""

    def __init__(self, manager: Any, prompt: list[int], params: dict[str, Any]) -> None:
        """prompt: its tokens, or none if they are not known. params: the sampling parameters."""
        self._decoded = DecodedTokens(manager.tokenizer, prompt, params)
        self._incremental = manager.server_args.incremental_streaming_output
        self._theirs = ""  # the text of SGLang's chunks
        self._text = ""  # the text of ours
        self._tokens = 0
        self._reasoning = 0  # tokens of reasoning

    def cut(self, chunk: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Chunks of one token each in the place of a chunk of SGLang's."""
        meta, begun = chunk["meta_info"], self._tokens
        new = chunk["output_ids"] if self._incremental else chunk["output_ids"][begun:]
        self._theirs = (self._theirs if self._incremental else "") + chunk["text"]
        finished = meta["finish_reason"] is not None
        reasoning = meta.get("reasoning_tokens") or 0
        for count, token in enumerate(new[:-1], 1):
            text = self._decoded.add(token)
            if finished:
                text = text[: len(self._theirs)]  # a stop string is cut off
            left = len(new) - count
            then = meta | {
                "finish_reason": None,
                "completion_tokens": begun + count,
                "reasoning_tokens": min(self._reasoning + count, reasoning),
            }
            if "output_token_logprobs_length" in meta:
                then["output_token_logprobs_length"] -= left
            yield self._part(chunk, begun, begun + count, text, then)
        text = self._decoded.add(new[-1]) if new else self._text
        if finished or self._decoded.is_complete():
            text = self._theirs
            self._decoded.agree(text)
        yield self._part(chunk, begun, begun + len(new), text, meta)
        self._reasoning = reasoning

    def _part(
        self, chunk: dict[str, Any], begun: int, tokens: int, text: str, meta: dict[str, Any]
    ) -> dict[str, Any]:
        """The chunk that brings an answer to this many tokens, and to this text.

        begun: tokens before SGLang's chunk.
        """
        span, shown = slice(tokens), text
        if self._incremental:
            span, shown = slice(self._tokens - begun, tokens - begun), text[len(self._text) :]
        self._tokens, self._text = tokens, text
        of_tokens = {key: meta[key][span] for key in OF_TOKENS if key in meta}
        ids = chunk["output_ids"][span]
        return chunk | {"text": shown, "output_ids": ids, "meta_info": meta | of_tokens}


class DecodedTokens:
    """The text of an answer after each token, by the rule of SGLang's detokenizer.

    See `DetokenizerManager._decode_batch_token_id_output`: a token is decoded with the tokens
    around it, and text that ends in incomplete UTF-8 is not complete.
    """

    def __init__(self, tokenizer: Any, prompt: list[int], params: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._skip_special = params.get("skip_special_tokens", True)
        self._spaces = params.get("spaces_between_special_tokens", True)
        self._ids = prompt[-INIT_INCREMENTAL_DETOKENIZATION_OFFSET:]
        self._around = 0  # index of the first token that is decoded again
        self._complete = len(self._ids)  # index of the first token whose text is not complete
        self._text = ""  # the complete text

    def add(self, token: int) -> str:
        """The answer's text after another token, without incomplete UTF-8."""
        self._ids.append(token)
        around = self._decode(self._ids[self._around : self._complete])
        text = self._decode(self._ids[self._around :])[len(around) :]
        if not text or text.endswith("\ufffd"):
            return self._text + str(find_printable_text(text))
        self._around, self._complete = self._complete, len(self._ids)
        self._text += text
        return self._text

    def is_complete(self) -> bool:
        """Whether no token has text that is still to come."""
        return self._complete == len(self._ids)

    def agree(self, text: str) -> None:
        """Take over the text that SGLang has.

        It differs where the prompt is not known, as with images: SGLang decodes its last tokens.
        """
        self._text = text

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        if not getattr(self._tokenizer, "is_fast", False):
            return str(decode_without_hf_kwargs(self._tokenizer, ids, self._skip_special))
        return str(
            self._tokenizer.decode(
                ids,
                skip_special_tokens=self._skip_special,
                spaces_between_special_tokens=self._spaces,
            )
        )
