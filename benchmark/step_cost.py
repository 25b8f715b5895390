"""Time of one decode step and of its parts, for ours, the built-in and no speculation.

Servers of one environment take turns. Accept lengths are SIMULATED, so both do equal work.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import requests
from rich.console import Console
from rich.table import Table

from benchmark import machine
from benchmark.load import Answer, accept_length
from benchmark.sides import add_axes, add_server_options, make_side, serving
from sglang_dflash.checkpoint import load_config
from sglang_dflash.method.simulate import simulated_commit
from sglang_dflash.tools.launch import Server, ServerFailed, interrupt_on_signals

PARTS = ("step", "host", "scheduler", "draft", "verify", "context_kv")
WARM_UP_STEPS = 3  # of every batch


class Timed:
    """A server whose step timers write to their own file."""

    def __init__(self, server: Server, times: Path) -> None:
        self._server, self._times = server, times

    def flush(self) -> None:
        """Flush the cache, so that no step has to evict earlier prompts."""
        requests.post(f"{self._server.url}/flush_cache?timeout=30", timeout=60).raise_for_status()

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[list[dict[str, Any]], float]:
        """Decode a whole batch; returns its timed steps at full size, and the accept length."""
        begin = self._times.stat().st_size
        sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": new_tokens}
        answer = requests.post(
            f"{self._server.url}/generate",
            json={"input_ids": prompts, "sampling_params": sampling},
            timeout=1800,
        )
        answer.raise_for_status()
        with self._times.open() as lines:
            lines.seek(begin)
            steps = [json.loads(line) for line in lines if line.endswith("\n")]
        full = [step for step in steps if step["batch"] == len(prompts)]
        answers = [Answer("", new_tokens, one["meta_info"]) for one in answer.json()]
        return full[WARM_UP_STEPS:], accept_length(answers)


def split(step: dict[str, float]) -> dict[str, float]:
    """Parts of a step that add up to it, in ms.

    If scheduling overlaps the device (no speculation on CUDA), the worker returns before the target
    has run. Then no host time is left, and the rest of the step counts as the scheduler's.
    """
    device = step["draft_ms"] + step["verify_ms"] + step["context_kv_ms"]
    host = max(0.0, step["worker_ms"] - device)
    found = {part: step[f"{part}_ms"] for part in ("step", "draft", "verify", "context_kv")}
    return found | {"host": host, "scheduler": step["step_ms"] - device - host}


def tokens_of(steps: int, accept_length: float, width: int) -> int:
    """Tokens that a request gets in prefill and in `steps` steps of the simulated sequence."""
    return 1 + sum(simulated_commit(step, accept_length, width) for step in range(steps))


def points(args: argparse.Namespace, room: int, console: Console) -> list[tuple[int, int]]:
    """The (batch, context) pairs that fit if each request adds `room` tokens to its context."""
    config = json.loads((args.model / "config.json").read_text())
    limit = config["max_position_embeddings"] - room
    fitting: list[tuple[int, int]] = []
    for context in args.contexts:
        for batch in args.batches:
            bounds = {
                "the model's context length": context > limit,
                "--max-total-tokens": batch * (context + room) > args.max_total_tokens,
                "--max-running-requests": batch > args.max_running_requests,
            }
            if past := [bound for bound, is_past in bounds.items() if is_past]:
                console.print(f"Left out: batch {batch} at context {context}, past {past[0]}.")
            else:
                fitting.append((batch, context))
    return fitting


def measure(args: argparse.Namespace, console: Console) -> Iterator[list[dict[str, Any]]]:
    """Measure each point, and yield its rows, one per side."""
    width = args.block_size or load_config(str(args.draft)).block_size
    new_tokens = {
        side: args.steps + 1 if side == "none" else tokens_of(args.steps, args.accept_length, width)
        for side in args.sides
    }
    vocabulary = json.loads((args.model / "config.json").read_text())["vocab_size"]
    chosen = points(args, max(new_tokens.values()) + 2 * width + 256, console)
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        times = {side: Path(folder, side) for side in args.sides}
        for path in times.values():
            path.touch()
        sides = [make_side(s, args, args.accept_length, times[s]) for s in args.sides]
        with serving(sides) as servers:
            timed = {name: Timed(server, times[name]) for name, server in servers.items()}
            for name, one in timed.items():
                one.run([[5] * 16], new_tokens[name])
            for batch, context in chosen:
                prompts = [
                    [rng.randrange(5, vocabulary) for _ in range(context)] for _ in range(batch)
                ]
                steps: dict[str, list[dict[str, float]]] = {side: [] for side in args.sides}
                accepted: dict[str, float] = {}
                for one in timed.values():
                    one.flush()
                for _ in range(args.repeats):
                    for side in rng.sample(args.sides, len(args.sides)):
                        found, accepted[side] = timed[side].run(prompts, new_tokens[side])
                        steps[side] += map(split, found)
                yield [
                    {"side": side, "batch": batch, "context": context}
                    | {f"{p}_ms": round(median(s[p] for s in steps[side]), 4) for p in PARTS}
                    | {"accept_length": round(accepted[side], 3)}
                    for side in args.sides
                ]


def table_of(rows: list[dict[str, Any]], accept_length: float) -> Table:
    columns = ["side", "batch", "context", *(f"{part}_ms" for part in PARTS), "accept_length"]
    title = f"One decode step, median ms; SIMULATED acceptance of {accept_length} tokens a step"
    shown = (column.removesuffix("_ms").removesuffix("_length") for column in columns)
    table = Table(*shown, title=title)
    for row in rows:
        table.add_row(*(f"{v:.2f}" if isinstance(v := row[c], float) else str(v) for c in columns))
    return table


def parse(argv: list[str] | None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(prog="python -m benchmark.step_cost", description=__doc__)
    parser.add_argument("--sides", type=lambda text: text.split(","), default=["ours", "builtin"])
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32])
    parser.add_argument("--contexts", type=numbers, default=[64, 512, 2048, 8192])
    parser.add_argument("--accept-length", type=float, default=6.36)
    parser.add_argument("--steps", type=int, default=24, help="decode steps of a request")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--out", type=Path, help="also write the JSON to a file after each point")
    add_server_options(parser)
    add_axes(parser, several=False)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    interrupt_on_signals()
    console = Console(stderr=args.json, width=100)
    console.print(
        f"SIMULATED acceptance: {args.accept_length} tokens a step. {args.threads} threads."
    )
    result: dict[str, Any] = {"rows": [], "hardware": machine.hardware()}
    result["versions"] = machine.versions() | {
        "acceptance": f"SIMULATED: {args.accept_length} tokens a step",
        "flags": " ".join(argv if argv is not None else sys.argv[1:]),
    }
    status = 0
    try:
        for rows in measure(args, console):
            result["rows"] += rows
            console.print(table_of(rows, args.accept_length))
            if args.out:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(result))
    except KeyboardInterrupt:
        console.print("Interrupted: what was measured is kept.")
        status = 130
    except ServerFailed as error:
        console.print(str(error), markup=False)
        status = 1
    console.print(table_of(result["rows"], args.accept_length))
    if args.json:
        print(json.dumps(result), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
