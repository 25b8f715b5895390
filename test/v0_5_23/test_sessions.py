"""Streaming sessions, which keep their KV between turns: each turn as without speculation."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang_dflash.tiny.prompts import held_out
from test.servers import ALL_FEATURES, Client, chat, running

WORD, CODE = held_out("word", 3), held_out("code", 3)
TALKS = range(6)
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "sampling_seed": 5},
    {"frequency_penalty": 0.5},
    {"regex": "[a-z ]{20}"},
]
LENGTHS = (60, 9, 33)


def talk(client: Client, number: int) -> list[Any]:
    """Three turns of a session: text, end, and tokens of prompt and cache."""
    opened = {"capacity_of_str_len": 1000, "streaming": True}
    session = client.post("/open_session", opened).json()
    texts = [chat(WORD[number % 3].prompt)]
    texts.append("<|im_end|>\n" + chat(WORD[(number + 1) % 3].prompt))
    texts.append("<|im_end|>\n" + chat(CODE[number % 3].prompt))
    said = []
    for turn, text in enumerate(texts):
        options = KINDS[(number + turn) % 4] | {"max_new_tokens": LENGTHS[(number + turn) % 3]}
        answer = client.generate(text, session_params={"id": session}, **options)
        meta = answer["meta_info"]
        # The prefix of a first turn is in the radix cache, or not, as the others have it.
        cached = meta["cached_tokens"] if turn else None
        said.append((answer["text"], meta["finish_reason"], meta["prompt_tokens"], cached))
    assert client.post("/close_session", {"session_id": session}).status_code == 200
    return said


@pytest.mark.parametrize("flags", [(), ("--page-size", "16")], ids=str)
def test_streaming_sessions(flags: tuple[str, ...]) -> None:
    every = (*ALL_FEATURES, "--enable-streaming-session", *flags)
    with running(*every, dflash=False) as plain:
        expected = [talk(plain, number) for number in TALKS]
    with running(*every, dflash=True) as server:
        assert [talk(server, number) for number in TALKS] == expected
        with ThreadPoolExecutor(len(TALKS)) as pool:
            assert list(pool.map(lambda number: talk(server, number), TALKS)) == expected
