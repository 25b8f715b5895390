"""`python -m test.chaos --minutes N --seed S [--pd] [FLAGS]`, or `make chaos MINUTES=N`.

A DFLASH server of the bundled pair, with these flags, a tiny KV pool and SGLang's strict memory
checks, answers clients that leave and abort, while it is flushed, paused and stalled. Every answer
must be the known one, or an abort that was asked for. After each round its slots are free, and it
has no more memory and descriptors than after the first. Then servers are killed part by part.
With `--pd`, a prefill and a decode server are behind a router, and a process of them is killed
after each round.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter

from test.chaos.apart import survive_apart
from test.chaos.deaths import DEATHS, killed_replicas
from test.chaos.load import questions
from test.chaos.rounds import Left, disturbed
from test.servers import SMALL_POOL, running

FLAGS = "--page-size", "4", *SMALL_POOL, "--enable-metrics"
ROUND = 15  # seconds of chaos between two looks at what is left
QUESTIONS = 24


def survive(seconds: float, seed: int, *flags: str) -> Counter[str]:
    """Disturb a server for so long. Returns what happened; raises `AssertionError`."""
    rng, counts, first = random.Random(seed), Counter[str](), None
    with running(*FLAGS, *flags, dflash=True) as server:
        asked = questions(server, rng, QUESTIONS)
        end = time.monotonic() + seconds
        while (rest := end - time.monotonic()) > 0:
            counts += disturbed(asked, server, [server], rng, min(ROUND, max(1.0, rest)))
            left = Left(server)
            first = first or left
            left.assert_no_more_than(first)
        log = server.server.log.read_text()
        assert "Traceback" not in log, log[log.index("Traceback") :][:3000]
        counts["retractions"] = log.count("KV cache pool is full. Retract requests")
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m test.chaos", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--minutes", type=float, default=3, help="of chaos; without --pd, deaths come on top"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pd", action="store_true", help="prefill and decode apart")
    options, flags = parser.parse_known_args()
    survived = survive_apart if options.pd else survive
    counts = survived(60 * options.minutes, options.seed, *flags)
    print("Survived:", ", ".join(f"{name} {n}" for name, n in sorted(counts.items())), flush=True)
    for death in () if options.pd else (*DEATHS, killed_replicas):
        started = time.monotonic()
        death()
        print(f"{death.__doc__} {time.monotonic() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
