"""Speed-up, acceptance and accuracy, side by side: no speculation, the built-in DFLASH, and ours.

All servers of a configuration run at once and take turns with the same prompts, except with
--apart. Whole answers give speed, acceptance and accuracy. A streamed pass gives latency. Each
result is written as soon as it is measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import requests
import torch
from rich.console import Console

from benchmark import machine, report, workloads
from benchmark.load import Answer, Settings, accept_length, answer_all, stream_all
from benchmark.sides import (
    FAMILIES,
    PEER,
    add_axes,
    add_server_options,
    make_side,
    serving,
    with_survival,
)
from benchmark.stats import percentile
from benchmark.workloads import Prompt
from sglang_dflash.seam import release
from sglang_dflash.tiny import TARGET
from sglang_dflash.tools.launch import ServerFailed, interrupt_on_signals

AXES = ("block_size", "verify_width", "tp", "page_size", "attention_backend")
WARM_UP_PROMPTS = 8
OPTIONAL = ("ngram", "eagle3")
NO_SAMPLING = "off CUDA the built-in verifies by argmax, whatever the temperature"


class Results:
    """A JSON file that is complete after every point. A later run continues where it stopped."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self._path = path
        self.data: dict[str, Any] = {
            "settings": settings,
            "hardware": machine.hardware(),
            "versions": machine.versions(),
            "points": [],
            "skipped": [],
        }
        if path.exists() and (before := json.loads(path.read_text()))["settings"] == settings:
            self.data["points"] = [point for point in before["points"] if "latency" in point]

    def has(self, point: dict[str, Any], side: str) -> bool:
        wanted = (point | {"side": side}).items()
        return any(wanted <= found.items() for found in self.data["points"])

    def add(self, key: str, row: dict[str, Any]) -> None:
        self.data[key].append(row)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self.data, indent=1) + "\n")
        partial.replace(self._path)


def acceptance(answers: list[Answer]) -> dict[str, Any]:
    """accept_length, and per_position[p - 1]: the share of steps that accepted draft p."""
    steps = sum(answer.meta.get("spec_verify_ct", 0) for answer in answers)
    histograms = [answer.meta.get("spec_correct_drafts_histogram", []) for answer in answers]
    counts = [sum(column) for column in itertools.zip_longest(*histograms, fillvalue=0)]
    per_position = [round(sum(counts[p:]) / steps, 4) for p in range(1, len(counts))]
    return {"accept_length": accept_length(answers), "per_position": per_position}


def accuracy(prompts: list[Prompt], answers: list[Answer]) -> float | None:
    """The share of right answers among those that can be judged."""
    right = [p.is_right(a.text) for p, a in zip(prompts, answers, strict=True) if p.is_right]
    return sum(right) / len(right) if right else None


def flush(urls: Sequence[str]) -> None:
    """Empty the radix caches, once the servers have nothing to do any more."""
    for url in urls:
        requests.post(f"{url}/flush_cache?timeout=30", timeout=60).raise_for_status()


def timed_run(urls: Sequence[str], prompts: list[Prompt], settings: Settings) -> dict[str, Any]:
    """One repeat: whole answers to all prompts, of one server or a fleet."""
    flush(urls)
    answers, seconds = answer_all(urls, prompts, settings)
    tokens = sum(answer.tokens for answer in answers)
    row: dict[str, Any] = {
        "tok_s": round(tokens / seconds, 2),
        "seconds": round(seconds, 3),
        "tokens": tokens,
    }
    row |= acceptance(answers) | {"accuracy": accuracy(prompts, answers), "by_workload": {}}
    for name in sorted({prompt.workload for prompt in prompts}):
        mine = [i for i, prompt in enumerate(prompts) if prompt.workload == name]
        theirs = [answers[i] for i in mine]
        row["by_workload"][name] = acceptance(theirs)
        row["by_workload"][name]["accuracy"] = accuracy([prompts[i] for i in mine], theirs)
    return row


def latency(urls: Sequence[str], prompts: list[Prompt], settings: Settings) -> dict[str, float]:
    """Time to first token and between tokens, in ms. The tokens of a chunk share its gap."""
    flush(urls)
    answers = stream_all(urls, prompts, settings)
    times = {"ttft": [answer.first_s for answer in answers]}
    times["itl"] = [gap for answer in answers for gap in answer.gaps]
    return {
        f"{name}_p{p}_ms": round(percentile(seconds, p) * 1e3, 3)
        for name, seconds in times.items()
        if seconds  # answers of one token have no gaps
        for p in (50, 99)
    }


def prompt_sets(args: argparse.Namespace) -> dict[str, list[Prompt]]:
    """Prompts by name. `--mix` makes one set of all: any beginning of it holds equal parts."""
    sets = dict(workloads.load(source, args.prompts, args.seed) for source in args.data)
    if not args.mix:
        return sets
    rng = random.Random(args.seed)
    shuffled = [rng.sample(prompts, len(prompts)) for prompts in sets.values()]
    in_turn = itertools.chain(*itertools.zip_longest(*shuffled))
    return {"+".join(sets): [prompt for prompt in in_turn if prompt is not None]}


def settings_at(
    args: argparse.Namespace, concurrency: int, temperature: float, filters: str | None = None
) -> Settings:
    """filters: JSON."""
    settings = Settings(
        concurrency, args.max_tokens, temperature, args.chat_template, args.ignore_eos
    )
    return replace(settings, filters=json.loads(filters)) if filters else settings


def configurations(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One value of each server axis."""
    for values in itertools.product(*(getattr(args, axis) for axis in AXES)):
        yield dict(zip(AXES, values, strict=True))


class Sweep:
    """One run of the command: all configurations, each with its own servers."""

    def __init__(self, args: argparse.Namespace, results: Results, console: Console) -> None:
        self._args, self._results, self._console = args, results, console
        self._given: dict[str, list[str]] = dict(args.base_url)
        self._names = list(dict.fromkeys([*args.sides, *self._given]))
        self._sets = prompt_sets(args)
        self._rng = random.Random(args.seed)
        self.broken: list[str] = []  # sides that should start and did not

    def run(self) -> None:
        for axes in configurations(self._args):
            if todo := self._todo(axes):
                self._configuration(axes, todo)

    def _todo(self, axes: dict[str, Any]) -> list[dict[str, Any]]:
        """Points of a configuration that some side has not measured, in shuffled order."""
        points = [
            axes
            | {"workload": workload, "concurrency": concurrency}
            | {"temperature": temperature, "filter": filters}
            for workload in self._sets
            for concurrency in self._args.concurrency
            for temperature in self._args.temperature
            for filters in ([None, *self._args.filter] if temperature > 0 else [None])
        ]
        self._rng.shuffle(points)
        return [p for p in points if not all(self._results.has(p, name) for name in self._names)]

    def _configuration(self, axes: dict[str, Any], todo: list[dict[str, Any]]) -> None:
        def failed(side: str, error: ServerFailed) -> None:
            self._console.print(f"{side} does not start: {error}", markup=False)
            reason = str(error).splitlines()[-1]
            self._results.add("skipped", axes | {"side": side, "reason": reason})
            if side not in OPTIONAL:
                self.broken.append(side)

        args = argparse.Namespace(**vars(self._args) | axes)
        lacking = [n for n in self._names if not all(self._results.has(p, n) for p in todo)]
        names = [name for name in lacking if name not in self._given]
        sides = [make_side(name, args, args.simulate_accept_length) for name in names]
        if args.simulate_survival:
            sides = [with_survival(side, args.simulate_survival) for side in sides]
        groups = [[side] for side in sides] if args.apart and sides else [sides]
        for together in groups:
            started = ", ".join(side.name for side in together)
            self._console.print(f"Starting {started or 'nothing'}: {_shown(axes)}", highlight=False)
            with serving(together, failed) as servers:
                self._points(self._given | {n: [s.url] for n, s in servers.items()}, todo)

    def _points(self, urls: dict[str, list[str]], todo: list[dict[str, Any]]) -> None:
        """Measure all points of these servers, after a warm-up of each."""
        if not urls:
            return
        warm_up = settings_at(self._args, WARM_UP_PROMPTS, 0.0)
        for url, prompts in itertools.product(itertools.chain(*urls.values()), self._sets.values()):
            answer_all([url], prompts[:WARM_UP_PROMPTS], warm_up)
        for number, point in enumerate(todo, start=1):
            self._console.print(f"{number} of {len(todo)}: {_shown(point)}", highlight=False)
            self._point(urls, point)

    def _point(self, urls: dict[str, list[str]], point: dict[str, Any]) -> None:
        """Measure all repeats of all sides at one point. The sides take turns in shuffled order.

        If a point is interrupted, its repeats so far are kept, and a later run measures it again.
        """
        asked = point["concurrency"], point["temperature"], point["filter"]
        settings = settings_at(self._args, *asked)
        prompts = self._prompts(point)
        counts = dict(Counter(prompt.workload for prompt in prompts))
        shown = ", ".join(f"{count} {workload}" for workload, count in counts.items())
        self._console.print(f"  {len(prompts)} prompts: {shown}", highlight=False)
        todo = [side for side in urls if not self._results.has(point, side)]
        samples = torch.cuda.is_available() or not release.has_own_scheduler_step()
        if "builtin" in todo and point["temperature"] > 0 and not samples:
            todo.remove("builtin")
            self._results.add("skipped", point | {"side": "builtin", "reason": NO_SAMPLING})
        common = point | {"prompts": counts}
        rows: dict[str, dict[str, Any]] = {
            side: common | {"side": side, "repeats": []} for side in todo
        }
        try:
            for _ in range(self._args.repeats):
                for side in self._rng.sample(todo, len(todo)):
                    run = timed_run(urls[side], prompts, settings)
                    rows[side]["repeats"].append(run)
                    self._console.print(f"  {side}: {run['tok_s']:.0f} tok/s", highlight=False)
            for side in todo:
                rows[side]["latency"] = latency(urls[side], prompts, settings)
        finally:
            for row in rows.values():
                if row["repeats"]:
                    self._results.add("points", row)

    def _prompts(self, point: dict[str, Any]) -> list[Prompt]:
        """As many of the point's prompts as `--per-slot` allows, the same of each data set."""
        prompts = self._sets[point["workload"]]
        if not self._args.per_slot:
            return prompts
        parts = len(self._args.data) if self._args.mix else 1
        of_each = -(-self._args.per_slot * point["concurrency"] // parts)
        return prompts[: of_each * parts]


def _shown(point: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in point.items() if value is not None)


def given_side(text: str) -> tuple[str, list[str]]:
    """A side's name, and the URLs of its servers."""
    name, _, urls = text.partition("=")
    if not name or not urls:
        raise argparse.ArgumentTypeError(f"{text!r} is not SIDE=URL")
    return name, [url.rstrip("/") for url in urls.split(",")]


def parse(argv: list[str] | None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(prog="python -m benchmark.sweep", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON; a later run continues it")
    parser.add_argument(
        "--sides",
        type=names,
        default=["none", "builtin", "ours"],
        help="of none, builtin, ours, ngram, eagle3, peer: SGLang's own in --peer",
    )
    parser.add_argument(
        "--base-url",
        action="append",
        type=given_side,
        default=[],
        metavar="SIDE=URL[,URL...]",
        help="a running server, or a fleet, whose servers share the requests of this side",
    )
    parser.add_argument(
        "--data",
        type=names,
        default=["word", "json", "code"],
        help="word, json, code (bundled), NAME=FILE.jsonl, or a public set's name",
    )
    parser.add_argument("--mix", action="store_true", help="all data sets as one load")
    parser.add_argument("--prompts", type=int, default=64, help="of each data set")
    parser.add_argument(
        "--per-slot", type=int, default=0, help="use at most this many prompts times concurrency"
    )
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--ignore-eos", action="store_true", help="for random weights")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--apart", action="store_true", help="one server at a time, if memory does not hold more"
    )
    parser.add_argument(
        "--concurrency", type=lambda t: [int(c) for c in names(t)], default=[1, 2, 4, 8, 16, 32]
    )
    parser.add_argument("--temperature", type=lambda t: [float(x) for x in names(t)], default=[0.0])
    parser.add_argument(
        "--filter",
        action="append",
        default=[],
        metavar="JSON",
        help='also with this filter above temperature 0, as {"top_p": 0.95, "top_k": 20}',
    )
    parser.add_argument("--chat-template", type=json.loads, default={"enable_thinking": False})
    parser.add_argument("--simulate-accept-length", type=float, default=0.0)
    parser.add_argument(
        "--simulate-survival",
        choices=["math_500", "mt_bench"],
        help="for ours: drafts whose acceptance by position is a published one",
    )
    add_server_options(parser)
    add_axes(parser, several=True)
    args = parser.parse_args(argv)
    if args.families is None and not set(FAMILIES).isdisjoint(args.sides):
        parser.error("give --families")
    if "eagle3" in args.sides and args.eagle3 is None:
        parser.error("the side eagle3 needs --eagle3 DRAFT")
    if PEER in args.sides and args.peer is None:
        parser.error("the side peer needs --peer PYTHON")
    return args


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that must be equal to continue a file. Paths count by their last part."""
    told = {key: value for key, value in vars(args).items() if key != "out"}
    told["base_url"] = dict(args.base_url)  # as JSON gives it back
    told["pair"] = "bundled" if args.model == TARGET else f"{args.model.name}, {args.draft.name}"
    untold = {"model", "draft", "families", "eagle3", "peer"} | (set() if args.apart else {"apart"})
    settings = {key: value for key, value in told.items() if key not in untold}
    return settings | ({"peer": machine.sglang_of(args.peer)} if PEER in args.sides else {})


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    interrupt_on_signals()
    console = Console(stderr=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    results = Results(args.out, settings_of(args))
    try:
        sweep = Sweep(args, results, console)
        sweep.run()
        status = 1 if sweep.broken else 0
    except KeyboardInterrupt:
        console.print(f"Interrupted: what was measured is in {args.out}.")
        status = 130
    table = report.markdown(results.data)
    args.out.with_suffix(".md").write_text(table)
    print(table)
    return status


if __name__ == "__main__":
    sys.exit(main())
