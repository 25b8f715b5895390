"""The sides of a comparison: starts the server of each side, and ends all of them."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from sglang_dflash.seam import release
from sglang_dflash.tiny import DRAFT, TARGET
from sglang_dflash.tools.launch import Server, ServerFailed

TIMERS = "dflash_step_timers"
SURVIVAL = "dflash_simulated_survival"
DECODE_GRAPHS = "--cuda-graph-max-bs-decode"  # since SGLang 0.5.19
PLUGINS = {"ours": ["dflash", "dflash_guard"], "builtin": ["dflash_builtin_bench"]}
PEER = "peer"  # the DFLASH of another SGLang, which `--peer` starts
# Sides: ours, with a draft of this family.
FAMILIES = ("dspark", "dflash2", "domino", "jetspec", "dspine", "lilicorr")


@dataclass(frozen=True)
class Side:
    """One server: its flags, its environment, and the Python that has its SGLang."""

    name: str
    flags: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    python: str = sys.executable


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Options that every side's server shares."""
    dtype = "auto" if torch.cuda.is_available() else "float32"  # fp32: exact, and faster on CPU
    parser.add_argument("--model", type=Path, default=TARGET)
    parser.add_argument("--draft", type=Path, default=DRAFT)
    parser.add_argument("--families", type=Path, help="its folders are drafts of sides so named")
    parser.add_argument("--eagle3", type=Path, help="draft of the side eagle3")
    parser.add_argument("--peer", metavar="PYTHON", help="has the SGLang of the side peer")
    parser.add_argument("--dtype", default=dtype)
    parser.add_argument("--max-total-tokens", type=int, default=65536, help="KV of each server")
    parser.add_argument("--max-running-requests", type=int, default=32)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--server-flags", default="", help="more flags for every server")
    parser.add_argument("--seed", type=int, default=1)


def add_axes(parser: argparse.ArgumentParser, several: bool) -> None:
    """The options by which servers differ. With `several` they take comma-separated lists."""

    def axis(name: str, kind: type, default: object, note: str = "") -> None:
        def values(text: str) -> list[object]:
            return [kind(value) for value in text.split(",")]

        parser.add_argument(
            name,
            type=values if several else kind,
            default=[default] if several else default,
            help=note,
        )

    axis("--block-size", int, None, "default: the checkpoint's")
    axis("--verify-width", str, None, "for ours: full, auto or a number; default: the server's")
    axis("--tp", int, 1)
    axis("--page-size", int, 1)
    axis("--attention-backend", str, None)


def make_side(
    name: str,
    args: argparse.Namespace,
    accept_length: float = 0.0,
    step_times: Path | None = None,
) -> Side:
    """`accept_length` > 0 simulates acceptance. Step timers write to the file `step_times`."""
    shown = name
    draft = args.families / name if name in FAMILIES else args.draft
    name = "ours" if name in FAMILIES else name
    flags = ["--model-path", str(args.model), "--dtype", args.dtype, "--sleep-on-idle"]
    flags += ["--max-total-tokens", str(args.max_total_tokens)]
    flags += ["--max-running-requests", str(args.max_running_requests)]
    graphs = "--cuda-graph-max-bs" if release.has_own_scheduler_step() else DECODE_GRAPHS
    flags += [graphs, str(args.max_running_requests)]
    flags += ["--page-size", str(args.page_size), "--tp", str(args.tp)]
    flags += ["--random-seed", str(args.seed), *args.server_flags.split()]
    if args.attention_backend:
        flags += ["--attention-backend", args.attention_backend]
    if name in (*PLUGINS, PEER):
        flags += ["--speculative-algorithm", "DFLASH"]
        flags += ["--speculative-draft-model-path", str(draft)]
        if args.block_size:
            flags += ["--speculative-dflash-block-size", str(args.block_size)]
    if name == "ngram":
        flags += ["--speculative-algorithm", "NGRAM"]
    if name == "eagle3":
        flags += ["--speculative-algorithm", "EAGLE3"]
        flags += ["--speculative-draft-model-path", str(args.eagle3)]
    width = args.verify_width or ("full" if accept_length else None)  # equal work if simulated
    if name == "ours" and width:
        flags += ["--speculative-dflash-verify-width", width]
    plugins = PLUGINS.get(name, [])
    if not torch.cuda.is_available():
        plugins = [*(PLUGINS["builtin"] if name == PEER else plugins), "dflash_cpu"]
    environment = {"OMP_NUM_THREADS": str(max(1, args.threads // args.tp))}
    if step_times is not None:
        plugins = [*plugins, TIMERS]
        environment["DFLASH_STEP_TIMES"] = str(step_times)
    if accept_length and name in (*PLUGINS, PEER):
        environment["SGLANG_SIMULATE_ACC_LEN"] = str(accept_length)
    environment["SGLANG_PLUGINS"] = ",".join(plugins) or "none"
    python = args.peer if name == PEER else sys.executable
    return Side(shown, flags, environment, python)


def with_survival(side: Side, profile: str) -> Side:
    """The same server with simulated drafts: `builtin_cpu/dflash_simulated_survival.py`."""
    plugins = f"{side.environment['SGLANG_PLUGINS']},{SURVIVAL}"
    simulated = {"SGLANG_PLUGINS": plugins, "DFLASH_SIMULATED_SURVIVAL": profile}
    return replace(side, environment=side.environment | simulated)


@contextlib.contextmanager
def serving(
    sides: list[Side], failed: Callable[[str, ServerFailed], None] | None = None
) -> Iterator[dict[str, Server]]:
    """Start all servers, and end them however the block is left.

    On a GPU they start at the same time. On a CPU they start one after another, because they share
    its cores and ours measures step times at startup. If a side does not start, `failed` is called
    and the side is left out. Without `failed`, the run ends.
    """
    with contextlib.ExitStack() as stack:
        servers = {}

        def start(side: Side) -> Server:
            command = side.python, "-m", "sglang.launch_server"
            server = Server(side.flags, side.environment, command=command)
            stack.push(server.__exit__)
            return server

        started = [start(side) for side in sides] if torch.cuda.is_available() else []
        for i, side in enumerate(sides):
            server = started[i] if started else start(side)
            try:
                server.__enter__()
            except ServerFailed as error:
                if failed is None:
                    raise
                failed(side.name, error)
            else:
                servers[side.name] = server
        yield servers
