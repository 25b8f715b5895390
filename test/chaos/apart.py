"""Chaos on a prefill and a decode server behind SGLang's router, each process of which is killed.

A part that has died is started again at its port. The others must serve with it as before.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from itertools import cycle
from typing import Any

import requests

from sglang_dflash.tools.launch import free_port
from test.chaos.deaths import ended
from test.chaos.disturb import child, processes
from test.chaos.load import WRONGLY, Load, Question, questions
from test.chaos.rounds import MORE_FILES, Left, disturbed
from test.fleet import DECODE, OVER_TCP, PATIENCE, PREFILL, Pair, launched
from test.servers import SMALL_POOL, Client

ROUND = 15  # seconds of chaos between two deaths
QUESTIONS = 12
OF_THE_DEAD = 10  # open files that SGLang and mooncake keep of a server that has died
AGAIN = 120  # seconds, at most, until a part that was started again has been noticed
FLAGS = "--page-size", "4", "--enable-metrics", "--max-running-requests", "32"
SMALL = (*SMALL_POOL, "--num-reserved-decode-tokens", "8")
# The decode server has missed two heartbeats, and forgets a prefill server's addresses.
MISSED = "Losing connection with prefill instance"
PARDONED = "abort|timed out|timeout"  # a request may lose its other half
ROUTER = (  # hides no error, and soon sees that a server is back
    *("--disable-retries", "--disable-circuit-breaker", "--health-check-timeout-secs", "30"),
    *("--health-check-interval-secs", "1", "--health-success-threshold", "1"),
)
PARTS = [  # and their processes
    *(("prefill", title) for title in ("scheduler", "detokenizer", "main")),
    *(("decode", title) for title in ("scheduler", "detokenizer", "main")),
    ("router", "main"),
]


class Apart(Client):
    """Both servers and the router, each of which can be started again, as one server."""

    def __init__(self, *flags: str) -> None:
        self._bootstrap, common = free_port(), (*FLAGS, *flags)
        bootstrap = "--disaggregation-bootstrap-port", str(self._bootstrap)
        self._flags = {
            "prefill": (*PREFILL, *bootstrap, *common),
            "decode": (*DECODE, *SMALL, *common),
        }
        self._ports = {part: free_port() for part in self._flags}
        self.servers: dict[str, Client] = {}
        self._running = {part: ExitStack() for part in ("prefill", "decode", "router")}

    def __enter__(self) -> Apart:
        with ExitStack() as failed:
            failed.push(self.__exit__)
            for part in self._running:
                self.start(part)
            failed.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        for server in self.servers.values():
            if error is None:
                assert "Traceback" not in server.server.log.read_text()
            else:
                error.add_note(server.server.tail(60))
        for running in self._running.values():
            running.__exit__(kind, error, trace)  # keeps the logs if there is an error

    def start(self, part: str) -> None:
        running = self._running[part]
        if part == "router":
            pair = Pair(**self.servers, port=self._bootstrap)
            self.url = running.enter_context(pair.routed(*ROUTER))
            return
        flags, port = self._flags[part], self._ports[part]
        launch = launched(flags, environment=OVER_TCP | PATIENCE, port=port)
        [server] = running.enter_context(launch)
        self.servers[part] = Client(server, flags)

    def kill(self, part: str, title: str) -> None:
        """Kill this process of a part, all of which ends in time."""
        if part != "router":
            server = self.servers[part]
            assert "Traceback" not in server.server.log.read_text()
            family = processes(server)
            (family[0] if title == "main" else child(server, title)).kill()
            assert ended(server, family) != 0
            del self.servers[part]
        self._running[part].close()  # which kills the router

    def logged(self, text: str) -> int:
        """How often it is in the decode server's log."""
        return self.servers["decode"].server.log.read_text().count(text)

    def post(
        self, path: str, body: dict[str, Any] | None = None, seconds: int = 300
    ) -> requests.Response:
        """The router does not pass an abort on."""
        if path != "/abort_request":
            return super().post(path, body, seconds)
        answers = [server.post(path, body, seconds) for server in [*self.servers.values()]]
        return max(answers, key=lambda answer: answer.status_code)


def survive_apart(seconds: float, seed: int, *flags: str) -> Counter[str]:
    """Disturb both servers for so long, and kill a process after each round, until each has died.

    Returns what happened; raises `AssertionError`.
    """
    rng, counts, first, kept = (
        random.Random(seed),
        Counter[str](),
        dict[str, Left](),
        Counter[str](),
    )
    end = time.monotonic() + seconds
    with Apart(*flags) as parts:
        asked = questions(parts, rng, QUESTIONS)
        for number, (part, title) in enumerate(cycle(PARTS)):
            if number >= len(PARTS) and time.monotonic() > end:
                break
            counts += disturbed(asked, parts, [*parts.servers.values()], rng, ROUND, PARDONED)
            for name, server in parts.servers.items():
                left = Left(server)
                left.assert_no_more_than(first.setdefault(name, left), MORE_FILES + kept[name])
            counts += kill_and_start(parts, part, title, asked, rng)
            if part != "router":
                [other] = parts.servers.keys() - {part}
                kept = Counter({other: kept[other] + OF_THE_DEAD})
            first.pop(part, None)
            print(f"{part}: {title} was killed, and the part started again", flush=True)
    return counts


def kill_and_start(
    parts: Apart, part: str, title: str, asked: list[Question], rng: random.Random
) -> Counter[str]:
    """Clients get errors, or no answer to the end, but no wrong one."""
    load = Load(parts, asked, rng.randrange(10**9), PARDONED, goes_on=True)
    counts, missed = Counter({f"deaths of {part}": 1}), parts.logged(MISSED)
    with load:
        time.sleep(rng.uniform(0.2, 3))
        if part == "decode":
            counts["retractions"] = parts.logged("Retract requests")
        parts.kill(part, title)
        time.sleep(2)
    wrong = [error for error in load.wrong if WRONGLY in error or "not answered" in error]
    assert not wrong, "\n".join(wrong)
    counts["lost"] = len(load.wrong)
    if part == "prefill":
        until(lambda: parts.logged(MISSED) > missed)
    parts.start(part)
    until(lambda: _is_answered(parts, asked[0]))
    return counts


def _is_answered(parts: Apart, question: Question) -> bool:
    body = {"text": question.prompt, "sampling_params": question.sampling}
    answer = parts.post("/generate", body)
    if answer.status_code == 200:
        assert answer.json()["output_ids"] == question.answer
    return answer.status_code == 200


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + AGAIN
    while not happened():
        assert time.monotonic() < end, f"It has not happened within {AGAIN} s."
        time.sleep(0.5)
