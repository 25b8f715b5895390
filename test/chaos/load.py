"""Clients with known answers. Some leave, some abort; all others must be answered exactly."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import requests

from sglang_dflash.tiny.prompts import held_out
from test.servers import Client, chat

CLIENTS = 8
TOKENS = (8, 40, 120)  # of an answer; with eight clients these do not fit into the small pool
WRONGLY = "was answered wrongly"  # a worse fault than an error
JSON_RECORD = '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}'


@dataclass(frozen=True)
class Question:
    prompt: str
    sampling: dict[str, Any]
    answer: list[int]  # token ids, asked when nothing else ran


def questions(server: Client, rng: random.Random, count: int) -> list[Question]:
    """Greedy questions with their answers. Some have penalties or a grammar."""
    kinds = ["word", "word", "code", "json"]
    found = []
    for i in range(count):
        kind = kinds[i % len(kinds)]
        [example] = held_out(kind, 1, seed=rng.randrange(10**6))
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": rng.choice(TOKENS)}
        if i % 5 == 1:
            sampling["frequency_penalty"] = 0.4
        if i % 5 == 3:
            sampling["json_schema"] = JSON_RECORD
        prompt = example.prompt if kind == "code" else chat(example.prompt)
        answer = server.generate(prompt, **sampling)["output_ids"]
        found.append(Question(prompt, sampling, answer))
    return found


@dataclass
class Load:
    """Clients that ask until they are told to stop."""

    server: Client
    asked: list[Question]
    seed: int
    pardoned: str = "abort"  # a pattern of errors that may come in place of an answer
    goes_on: bool = False  # after errors that are not pardoned
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._client, args=(random.Random(f"{self.seed}-{i}"),))
            for i in range(CLIENTS)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=120)
            if thread.is_alive():
                self.wrong.append("a request was not answered within 120 s")

    def _client(self, rng: random.Random) -> None:
        ways = [self._whole, self._stream, self._leave, self._abort]
        while not self._stop.is_set() and (self.goes_on or not self.wrong):
            question, way = rng.choice(self.asked), rng.choice(ways)
            name = way.__name__.removeprefix("_")
            try:
                way(question, rng)
            except Exception as error:  # noqa: BLE001 - a thread that ended would say nothing
                self.wrong.append(f"{name}: {error!r}")
                time.sleep(0.1)
            self.counts[name] += 1

    def _body(self, question: Question, **more: Any) -> dict[str, Any]:
        return {"text": question.prompt, "sampling_params": question.sampling, **more}

    def _whole(self, question: Question, _: random.Random) -> None:
        response = self.server.post("/generate", self._body(question))
        self._judge("whole", question, response.status_code, response.json())

    def _stream(self, question: Question, _: random.Random) -> None:
        *_, last = self._events(question)
        self._judge("stream", question, 200, last)

    def _leave(self, question: Question, rng: random.Random) -> None:
        """A client that is gone after a few chunks."""
        for _, event in zip(range(rng.randint(1, 4)), self._events(question), strict=False):
            self._judge_part("leave", question, event)

    def _abort(self, question: Question, rng: random.Random) -> None:
        rid = f"chaos-{rng.getrandbits(64):x}"
        timer = threading.Timer(rng.uniform(0, 0.5), self._send_abort, (rid,))
        timer.start()
        response = self.server.post("/generate", self._body(question, rid=rid))
        timer.join()
        self._judge("abort", question, response.status_code, response.json())

    def _send_abort(self, rid: str) -> None:
        try:
            assert self.server.post("/abort_request", {"rid": rid}).status_code == 200
        except Exception as error:  # noqa: BLE001 - as above
            self.wrong.append(f"abort of {rid}: {error!r}")

    def _events(self, question: Question) -> Any:
        body = self._body(question, stream=True)
        url = f"{self.server.url}/generate"
        with requests.post(url, json=body, timeout=300, stream=True) as response:
            for line in response.iter_lines():
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))

    def _judge(self, how: str, question: Question, status: int, answer: dict[str, Any]) -> None:
        """An answer is the known one, or an abort that somebody asked for."""
        if not self._judge_part(how, question, answer):
            return
        if status != 200:
            self.wrong.append(f"{how}: {status} {json.dumps(answer)[:300]}")
            return
        if _is_aborted(answer):
            return
        if answer["output_ids"] != question.answer:
            self.wrong.append(f"{how}: {question} {WRONGLY}: it ended early: {answer}")
        self.counts["answered in full"] += 1

    def _judge_part(self, how: str, question: Question, answer: dict[str, Any]) -> bool:
        """Whether it is an answer, or the beginning of one, and no error."""
        if "error" in answer:
            error = json.dumps(answer["error"])
            # A prefill server fails the half of a request that is aborted while its grammar is
            # compiled, and the decode server says only this.
            is_half = "json_schema" in question.sampling and "Failed to get kvcache" in error
            if is_half or re.search(self.pardoned, error, re.I):
                self.counts["pardoned"] += 1
            else:
                self.wrong.append(f"{how}: {json.dumps(answer)[:300]}")
            return False
        given, end = answer["output_ids"], answer["meta_info"]["finish_reason"]
        if end and end.get("message") == "Aborted by AbortReq.":
            # SGLang prefills a single token 0 for a request that is aborted while its grammar is
            # compiled, and what is drawn after that comes with the abort.
            is_right = "json_schema" in question.sampling and len(given) == 1
        elif end and len(given) == 1:
            # SGLang ends the stream of a request that is aborted in the queue, as after a
            # retraction, with its last token alone.
            known = question.answer if _is_aborted(answer) else question.answer[:1]
            is_right = given[0] in known
        else:
            is_right = given == question.answer[: len(given)]
        if not is_right:
            self.wrong.append(f"{how}: {question} {WRONGLY}: {given}")
        return True


def _is_aborted(answer: dict[str, Any]) -> bool:
    return bool(answer["meta_info"]["finish_reason"]["type"] == "abort")


def calm(server: Client, seconds: float = 60) -> None:
    """Wait until the server has no request, and its slots are free. Raises `AssertionError`."""
    deadline = time.monotonic() + seconds
    while True:
        answer = server.post("/flush_cache?timeout=5")
        if answer.status_code == 200:
            return
        assert time.monotonic() < deadline, f"The server is not idle after {seconds} s."
