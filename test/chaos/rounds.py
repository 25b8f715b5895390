"""A round of chaos, and what servers hold after it."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack

from test.chaos.disturb import Disturber, processes
from test.chaos.load import Load, Question, calm
from test.servers import Client

MORE_BYTES = 64 * 2**20  # of a process, that caches may take after the first round
MORE_FILES = 8  # open files of a process


class Left:
    """What the processes of a calm server hold."""

    def __init__(self, server: Client) -> None:
        self.bytes: dict[int, int] = {}
        self.files: dict[int, int] = {}
        for process in processes(server):
            self.bytes[process.pid] = process.memory_info().rss
            self.files[process.pid] = process.num_fds()

    def assert_no_more_than(self, before: Left, more_files: int = MORE_FILES) -> None:
        assert self.bytes.keys() == before.bytes.keys(), "a process has gone or come"
        for pid, held in self.bytes.items():
            grown = held - before.bytes[pid]
            assert grown <= MORE_BYTES, f"process {pid} grew by {grown} bytes"
            opened = self.files[pid] - before.files[pid]
            assert opened <= more_files, f"process {pid} has {opened} more open files"


def disturbed(
    asked: list[Question],
    front: Client,
    servers: Sequence[Client],
    rng: random.Random,
    seconds: float,
    pardoned: str = Load.pardoned,
) -> Counter[str]:
    """Disturb servers while clients ask the one in front. Then all are idle, and answer as before.

    Returns what happened; raises `AssertionError`.
    """
    with ExitStack() as stack:
        load = stack.enter_context(Load(front, asked, rng.randrange(10**9), pardoned))
        disturbers = [
            stack.enter_context(Disturber(server, rng.randrange(10**9))) for server in servers
        ]
        time.sleep(seconds)
    wrong = [*load.wrong, *(error for each in disturbers for error in each.wrong)]
    assert not wrong, "\n".join([*wrong[:5], *(server.server.tail(40) for server in servers)])
    for server in servers:
        calm(server)
    for question in asked[:3]:
        assert front.generate(question.prompt, **question.sampling)["output_ids"] == question.answer
    for server in servers:
        calm(server)
    return sum((each.counts for each in disturbers), load.counts)
