"""`python -m test.chaos --minutes N --seed S [FLAGS]`, or `make chaos MINUTES=N`.

A DFLASH server of the bundled pair, with these flags, a tiny KV pool and SGLang's strict memory
checks, answers clients that leave and abort, while it is flushed, paused and stalled. Every answer
must be the known one, or an abort that was asked for. After each round its slots are free, and it
has no more memory and descriptors than after the first. Then servers are killed part by part.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter

from test.chaos.deaths import DEATHS, killed_replicas
from test.chaos.disturb import Disturber, processes
from test.chaos.load import Load, calm, questions
from test.servers import SMALL_POOL, Client, running

FLAGS = "--page-size", "4", *SMALL_POOL, "--enable-metrics"
ROUND = 15  # seconds of chaos between two looks at what is left
QUESTIONS = 24
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

    def assert_no_more_than(self, before: Left) -> None:
        assert self.bytes.keys() == before.bytes.keys(), "a process has gone or come"
        for pid, held in self.bytes.items():
            grown = held - before.bytes[pid]
            assert grown <= MORE_BYTES, f"process {pid} grew by {grown} bytes"
            opened = self.files[pid] - before.files[pid]
            assert opened <= MORE_FILES, f"process {pid} has {opened} more open files"


def survive(seconds: float, seed: int, *flags: str) -> Counter[str]:
    """Disturb a server for so long. Returns what happened; raises `AssertionError`."""
    rng, counts, first = random.Random(seed), Counter[str](), None
    with running(*FLAGS, *flags, dflash=True) as server:
        asked = questions(server, rng, QUESTIONS)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with (
                Load(server, asked, rng.randrange(10**9)) as load,
                Disturber(server, rng.randrange(10**9)) as disturber,
            ):
                time.sleep(min(ROUND, max(1.0, end - time.monotonic())))
            wrong = load.wrong + disturber.wrong
            assert not wrong, "\n".join([*wrong[:5], server.server.tail(40)])
            counts += load.counts + disturber.counts
            calm(server)
            left = Left(server)
            if first is None:
                first = left
            left.assert_no_more_than(first)
            for question in asked[:3]:
                again = server.generate(question.prompt, **question.sampling)["output_ids"]
                assert again == question.answer
            calm(server)
        log = server.server.log.read_text()
        assert "Traceback" not in log, log[log.index("Traceback") :][:3000]
        counts["retractions"] = log.count("KV cache pool is full. Retract requests")
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m test.chaos", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=3, help="of chaos; deaths come on top")
    parser.add_argument("--seed", type=int, default=0)
    options, flags = parser.parse_known_args()
    counts = survive(60 * options.minutes, options.seed, *flags)
    print("Survived:", ", ".join(f"{name} {n}" for name, n in sorted(counts.items())), flush=True)
    for death in (*DEATHS, killed_replicas):
        started = time.monotonic()
        death()
        print(f"{death.__doc__} {time.monotonic() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
