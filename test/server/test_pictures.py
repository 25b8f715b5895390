"""Pictures over HTTP: what a vision target sees, and what is no picture."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from PIL import Image

from test.checkpoints import draft_config, draft_weights, word, write_draft
from test.server.fuzzing import fuzz
from test.servers import Client, running
from test.targets import write

PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
PROMPT = f"{word(5)} {word(6)} {PLACE} {word(7)}"
GREEDY = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}

pytestmark = pytest.mark.ci


def png(width: int, height: int, mode: str = "RGB", colour: int = 0) -> bytes:
    file = io.BytesIO()
    Image.effect_noise((width, height), 50 + colour).convert(mode).save(file, "PNG")
    return file.getvalue()


def uri(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


SMALL = png(64, 64)
GOOD = uri(SMALL)
HUGE = SMALL[:16] + (2**30).to_bytes(4, "big") * 2 + SMALL[24:]  # so its header says
WRONG: dict[str, Any] = {
    "cut off": uri(SMALL[:40]),
    "half": uri(SMALL[: len(SMALL) // 2]),
    "too many pixels": uri(HUGE),
    "too flat": uri(png(2000, 2)),
    "no picture": uri(b"hello"),
    "nothing": uri(b""),
    "no base64": "data:image/png;base64,@@@",
    "no data": "data:",
    "a word": "x",
    "a folder": "/etc",
    "a file of text": "/etc/passwd",
    "no file": "/nope.png",
    "nobody there": "http://127.0.0.1:9/x.png",
    "no host": "http://",
    "another protocol": "ftp://x/y.png",
    "a drawing": uri(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"),
    "NUL": "\0",
    "a number": 5,
    "a fraction": 1.5,
    "true": True,
    "no fields": {},
    "another field": {"x": 1},
    "no such format": {"format": "nope"},
    "no feature": {"format": "precomputed_embedding"},
    "a list in a list": [[[GOOD]]],
    "a film": uri(b"x", "video/mp4"),
}


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The target's, then the draft's."""
    folder = tmp_path_factory.mktemp("vision")
    write(folder / "target", "Qwen3VLForConditionalGeneration")
    config = draft_config()
    write_draft(folder / "draft", config, draft_weights(config))
    target = "--model-path", str(folder / "target"), "--chat-template", "qwen2-vl"
    return *target, "--speculative-draft-model-path", str(folder / "draft")


@pytest.fixture(scope="module")
def pictures() -> dict[str, str]:
    modes = ("RGB", "L", "LA", "P", "RGBA", "1")
    return {mode: uri(png(64 + 32 * i, 64, mode, i)) for i, mode in enumerate(modes)}


@pytest.fixture(scope="module")
def answers(flags: tuple[str, ...], pictures: dict[str, str]) -> dict[str, list[int]]:
    """Without speculation."""
    with running(*flags[:4], dflash=False) as client:
        return {mode: see(client, picture) for mode, picture in pictures.items()}


@pytest.fixture(scope="module")
def server(flags: tuple[str, ...], answers: dict[str, list[int]]) -> Iterator[Client]:
    with running(*flags, dflash=True) as client:
        yield client


def ask(server: Client, **fields: Any) -> requests.Response:
    body = {"text": PROMPT, "sampling_params": GREEDY}
    return server.post("/generate", body | fields)


def see(server: Client, picture: str) -> list[int]:
    answer = ask(server, image_data=picture)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["output_ids"]
    return ids


def test_equals_the_target(
    server: Client, pictures: dict[str, str], answers: dict[str, list[int]]
) -> None:
    for mode, picture in pictures.items():
        assert see(server, picture) == answers[mode]
    assert len({tuple(ids) for ids in answers.values()}) > 1  # they are seen


def test_what_is_no_picture(server: Client, pictures: dict[str, str]) -> None:
    """SGLang answers many of them with HTTP 500."""
    first, wrong = next(iter(pictures.values())), []
    before = see(server, first)
    for name, value in WRONG.items():
        answer = ask(server, image_data=value)
        if answer.status_code != 400:
            wrong.append((name, answer.status_code, answer.text[:200]))
    assert not wrong, "\n".join(map(str, wrong))
    assert see(server, first) == before


def test_no_answer_is_an_error_of_the_server(server: Client, pictures: dict[str, str]) -> None:
    """Other kinds of media, batches, and the chat API."""
    first = next(iter(pictures.values()))
    before = see(server, first)
    texts: list[Any] = [value for value in WRONG.values() if isinstance(value, str)]
    film = f"{word(5)} <|vision_start|><|video_pad|><|vision_end|>"
    bodies: list[tuple[str, dict[str, Any]]] = [
        *(("/generate", {"text": film, "video_data": value}) for value in WRONG.values()),
        *(("/generate", {"text": word(5), "audio_data": value}) for value in WRONG.values()),
        *(("/generate", {"text": PROMPT, "image_data": [first, value]}) for value in texts),
        *(("/generate", {"text": [PROMPT] * 2, "image_data": [first, v]}) for v in texts),
        *(("/generate", {"text": PROMPT, "modalities": m, "image_data": first}) for m in (5, "x")),
        *(("/generate", {"text": PROMPT, "mm_hashes": h, "image_data": first}) for h in (5, ["z"])),
        ("/generate", {"text": PROMPT}),
        ("/generate", {"text": f"{PROMPT} {PROMPT}", "image_data": first}),
        ("/generate", {"input_ids": [5, 151, 6], "image_data": first}),
        ("/generate", {"input_embeds": [[0.1] * 64] * 3, "image_data": first}),
    ]
    for kind in ("image", "video", "audio"):
        for value in texts:
            part = {"type": f"{kind}_url", f"{kind}_url": {"url": value}}
            message = {"role": "user", "content": [{"type": "text", "text": word(5)}, part]}
            bodies.append(("/v1/chat/completions", {"model": "x", "messages": [message]}))
    wrong = []
    for path, body in bodies:
        short = {"max_tokens": 4} if "messages" in body else {"sampling_params": GREEDY}
        answer = server.post(path, body | short)
        if answer.status_code not in (200, 400):
            wrong.append((path, body, answer.status_code, answer.text[:200]))
        assert server.server.alive, (path, body, server.server.tail(60))
    assert not wrong, "\n".join(str(each)[:500] for each in wrong)
    assert see(server, first) == before


def test_a_picture_in_a_chat(server: Client, pictures: dict[str, str]) -> None:
    found = set()
    for picture in list(pictures.values())[:2]:
        part = {"type": "image_url", "image_url": {"url": picture}}
        message = {"role": "user", "content": [{"type": "text", "text": word(5)}, part]}
        body = {"model": "x", "messages": [message], "temperature": 0, "max_tokens": 16}
        answer = server.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        found.add(answer.json()["choices"][0]["message"]["content"])
    assert len(found) == 2


def test_no_request_is_an_error_of_the_server(server: Client) -> None:
    fuzz(server, 100)
