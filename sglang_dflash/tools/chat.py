"""A chat in the terminal. Accepted drafts are coloured by their position in the block."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import requests
from rich.console import Console
from rich.text import Text

HUES = (39, 38, 37, 36, 35, 71, 107, 143, 179, 178, 214, 208, 203, 204, 205, 169)  # of 256 colours
SECONDS = 600  # without a byte from the server


class Token(NamedTuple):
    text: str
    position: int  # of an accepted draft, from 1; 0: the target's own token


@dataclass
class Watched:
    """An answer so far. It takes the events of a `/generate` stream with `spec_steps`."""

    incremental: bool = False  # the server sends new text only (--incremental-streaming-output)
    text: str = ""
    tokens: int = 0
    steps: int = 0
    width: int = 0  # positions that the last step verified
    replica: int | None = None  # that answers
    _begin: float = field(default_factory=time.perf_counter)

    def see(self, event: dict[str, Any]) -> list[Token]:
        """The new tokens of an event. Without a step yet, they are not known."""
        meta, reason = event["meta_info"], event["meta_info"]["finish_reason"] or {}
        if reason.get("type") == "abort":
            raise requests.RequestException(f"The request was aborted: {reason.get('message')}")
        self.text = self.text + event["text"] if self.incremental else event["text"]
        if self.tokens == 0:  # prefill's
            self._begin = time.perf_counter()
        self.tokens, self.replica = meta["completion_tokens"], meta.get("dp_rank")
        new = []
        for step in meta.get("spec_steps", []):
            if step["number"] < self.steps:
                continue
            if step["text_before"]:
                new.append(Token(step["text_before"], 0))
            for i, text in enumerate(step["texts"]):
                new.append(Token(text, i + 1 if i < step["num_accepted"] else 0))
            self.steps, self.width = step["number"] + 1, step["num_verified"] + 1
        if new and isinstance(reason.get("matched"), int):
            new.pop()  # the end token of a turn
        elif reason and self.steps == 0:
            new.append(Token(self.text, 0))
        return new

    def summary(self, replicas: int = 1) -> str:
        """Counts and the speed of decoding, which starts at the first token.

        replicas: of the server. If it has several, the one that answered is named.
        """
        by = f"Replica {self.replica}: " if replicas > 1 else ""
        seconds, decoded = time.perf_counter() - self._begin, self.tokens - 1
        if not self.steps:
            return f"{by}{self.tokens} tokens, no step"
        return (
            f"{by}{self.tokens} tokens in {self.steps} steps: {decoded / self.steps:.2f} tokens a "
            f"step, {decoded / seconds:.0f} tokens a second, last verify width {self.width}"
        )


class Chat:
    """A conversation with a server."""

    def __init__(
        self, url: str, api_key: str | None, thinking: bool, sampling: dict[str, Any]
    ) -> None:
        """sampling: sampling parameters of `/generate`."""
        self._url, self._sampling = url.rstrip("/"), sampling
        self._session = requests.Session()
        if api_key is not None:
            self._session.headers["Authorization"] = f"Bearer {api_key}"
        self._kwargs = {"enable_thinking": thinking}
        self._messages: list[dict[str, str]] = []

    def server_info(self) -> dict[str, Any]:
        """What the server says of itself. A DFLASH server has a field `sglang_dflash`."""
        answer = self._session.get(f"{self._url}/server_info", timeout=30)
        answer.raise_for_status()
        info: dict[str, Any] = answer.json()
        return info

    def ask(self, prompt: str, watched: Watched) -> Iterator[Token]:
        """Send a turn. The tokens of the answer come as the server commits them."""
        messages = [*self._messages, {"role": "user", "content": prompt}]
        asked = {"messages": messages, "chat_template_kwargs": self._kwargs}
        tokens = self._post("/tokenize", asked).json()["tokens"]
        body = {
            "input_ids": tokens,
            "stream": True,
            "return_logprob": True,
            "sampling_params": {**self._sampling, "custom_params": {"spec_steps": True}},
        }
        with self._post("/generate", body, stream=True) as answer:
            for line in answer.iter_lines():
                if line.startswith(b"data: {"):
                    event = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        raise requests.RequestException(event["error"]["message"])
                    yield from watched.see(event)
        self._messages = [*messages, {"role": "assistant", "content": watched.text}]

    def _post(self, path: str, body: dict[str, Any], **options: Any) -> requests.Response:
        answer = self._session.post(f"{self._url}{path}", json=body, timeout=SECONDS, **options)
        if answer.status_code != 200:
            raise requests.RequestException(f"{answer.status_code}: {answer.text}")
        return answer


def styled(token: Token) -> Text:
    """The token in its colour. Characters that steer a terminal are not printed."""
    text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in token.text)
    if token.position == 0:
        return Text(text, style="bold")
    return Text(text, style=f"color({HUES[(token.position - 1) % len(HUES)]})")


def run(url: str, api_key: str | None, thinking: bool, sampling: dict[str, Any]) -> int:
    """Chat until the end of the input. Returns the exit status."""
    console = Console(highlight=False)
    chat = Chat(url, api_key, thinking, sampling)
    try:
        info = chat.server_info()
    except (requests.RequestException, ValueError) as error:
        print(f"sglang-dflash: {url} does not answer: {error}", file=sys.stderr)
        return 1
    served = info.get("sglang_dflash")
    if served is None:
        print(
            f"sglang-dflash: {url} does not serve DFLASH with this package. Start it with "
            "--speculative-algorithm DFLASH.",
            file=sys.stderr,
        )
        return 2
    replicas = len(info["internal_states"])
    several = f", {replicas} replicas" if replicas > 1 else ""
    console.print(
        f"{served['family']} draft {served['draft']}, block {served['block_size']}, verify width "
        f"{served['verify_width']}{several}. Coloured: accepted drafts, by position. Bold: the "
        "target's own tokens. Ctrl-D ends the chat.",
        style="dim",
        markup=False,
    )
    while True:
        try:
            prompt = console.input("\n> ")
        except EOFError:
            return 0
        if not prompt.strip():
            continue
        watched = Watched(bool(info.get("incremental_streaming_output")))
        try:
            for token in chat.ask(prompt, watched):
                console.print(styled(token), end="", soft_wrap=True)
        except requests.RequestException as error:
            print(f"sglang-dflash: {error}", file=sys.stderr)
            return 1
        console.print(f"\n{watched.summary(replicas)}", style="dim")
