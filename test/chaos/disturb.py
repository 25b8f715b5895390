"""Disturbances that a server must survive, while it answers requests."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable

import psutil
import requests

from test.fleet import family
from test.servers import Client

BAD_BODIES = ('{"text": 1}', "[", '{"text": "x", "sampling_params": {"stop": 1}}', '{"rid": []}')


class Disturber:
    """Disturbs a server at random moments until it is told to stop."""

    def __init__(self, server: Client, seed: int) -> None:
        self._server, self._rng = server, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._ways: list[Callable[[], None]] = [
            self._flush,
            self._abort_all,
            self._pause,
            self._stall,
            self._bad_body,
            self._look,
        ]

    def __enter__(self) -> Disturber:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=60)
        if self._thread.is_alive():
            self.wrong.append("a disturbance has not ended within 60 s")

    def _run(self) -> None:
        while not self._stop.wait(self._rng.uniform(0.2, 1.0)):
            way = self._rng.choice(self._ways)
            name = way.__name__.removeprefix("_")
            try:
                way()
            except Exception as error:  # noqa: BLE001 - a thread that ended would say nothing
                self.wrong.append(f"{name}: {error!r}")
            self.counts[name] += 1

    def _flush(self) -> None:
        """It is refused while requests run."""
        assert self._server.post("/flush_cache").status_code in (200, 400)

    def _abort_all(self) -> None:
        assert self._server.post("/abort_request", {"abort_all": True}).status_code == 200

    def _pause(self) -> None:
        modes = ["in_place"] if "decode" in self._server.flags else ["in_place", "retract"]
        mode = self._rng.choice(modes)
        assert self._server.post("/pause_generation", {"mode": mode}).status_code == 200
        time.sleep(self._rng.uniform(0, 0.5))
        assert self._server.post("/continue_generation").status_code == 200

    def _stall(self) -> None:
        """A process gets no time for a while."""
        process = self._rng.choice(processes(self._server))
        process.send_signal(signal.SIGSTOP)
        try:
            time.sleep(self._rng.uniform(0.1, 0.8))
        finally:
            process.send_signal(signal.SIGCONT)

    def _bad_body(self) -> None:
        answer = requests.post(
            f"{self._server.url}/generate",
            data=self._rng.choice(BAD_BODIES),
            headers={"content-type": "application/json"},
            timeout=60,
        )
        assert 400 <= answer.status_code < 500, answer.text

    def _look(self) -> None:
        path = self._rng.choice(["/metrics", "/server_info", "/health", "/v1/models", "/dflash"])
        assert requests.get(f"{self._server.url}{path}", timeout=60).status_code == 200


def processes(server: Client) -> list[psutil.Process]:
    """The server and its children."""
    return family(server.server)


def child(server: Client, name: str) -> psutil.Process:
    """The child whose title has this name, such as "detokenizer"."""
    [found] = [each for each in processes(server) if name in " ".join(each.cmdline())]
    return found
