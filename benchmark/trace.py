"""A profiler trace of ten decode steps of a server under a steady load, and a summary of it.

Acceptance is simulated, so all sides do equal work. Servers run one at a time. The trace has
Chrome's format (gzip).
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import requests

from benchmark.sides import add_axes, add_server_options, make_side, serving
from sglang_dflash.tools.launch import Server, ServerFailed, interrupt_on_signals

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def profile(
    server: Server, batch: int, context: int, tokens: int, steps: int, folder: Path
) -> Path:
    """Trace `steps` steps in the middle of a load of `batch` requests of `tokens` each."""
    body = {
        "input_ids": [[5 + (7 * i + j) % 1000 for j in range(context)] for i in range(batch)],
        "sampling_params": {"temperature": 0, "ignore_eos": True, "max_new_tokens": tokens},
    }
    answers: list[requests.Response] = []

    def ask() -> None:
        answers.append(requests.post(f"{server.url}/generate", json=body, timeout=600))

    load = threading.Thread(target=ask, daemon=True)
    load.start()
    time.sleep(0.7)  # past the prefill
    asked = {"output_dir": str(folder), "num_steps": steps, "activities": ["CPU", "GPU"]}
    requests.post(f"{server.url}/start_profile", json=asked, timeout=120).raise_for_status()
    load.join()
    for answer in answers:
        answer.raise_for_status()
    for _ in range(60):
        if found := sorted(folder.rglob("*.trace.json.gz")):
            time.sleep(1)  # it is being written
            return found[-1]
        time.sleep(1)
    raise ServerFailed(f"no trace was written\n{server.tail()}")


def summary(trace: Path, steps: int) -> dict[str, Any]:
    """Per step: device time by kernel, device idle time, launches and waits of the host."""
    with gzip.open(trace, "rt") as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
    device = sorted((e for e in events if e.get("cat") in DEVICE), key=lambda e: e["ts"])
    kernels: dict[str, list[float]] = defaultdict(list)
    busy, end = 0.0, 0.0
    for event in device:
        kernels[event["name"][:110]].append(event["dur"])
        busy += max(0.0, event["ts"] + event["dur"] - max(end, event["ts"]))
        end = max(end, event["ts"] + event["dur"])
    span = end - device[0]["ts"] if device else 0.0
    calls: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            calls[event["name"]].append(event["dur"])
    top = sorted(kernels.items(), key=lambda item: -sum(item[1]))

    def row(name: str, durations: list[float]) -> dict[str, Any]:
        return {
            "name": name,
            "count": round(len(durations) / steps, 2),
            "us": round(sum(durations) / steps, 1),
        }

    return {
        "span_us": round(span / steps, 1),
        "busy_us": round(busy / steps, 1),
        "kernels": [row(*item) for item in top[:45]],
        "host_calls": [row(*item) for item in sorted(calls.items(), key=lambda i: -len(i[1]))],
    }


def show(name: str, found: dict[str, Any]) -> None:
    print(f"{name}: a step {found['span_us']} us, device busy {found['busy_us']} us")
    for part in ("host_calls", "kernels"):
        for line in found[part][:14]:
            print(f"  {line['us']:9.1f} us {line['count']:7.1f} x {line['name'][:90]}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.trace", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of traces and summaries")
    parser.add_argument("--sides", type=lambda text: text.split(","), default=["ours", "builtin"])
    parser.add_argument("--batches", type=lambda t: [int(n) for n in t.split(",")], default=[1, 32])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1500, help="that each request generates")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--accept-length", type=float, default=6.36)
    add_server_options(parser)
    add_axes(parser, several=False)
    args = parser.parse_args(argv)
    interrupt_on_signals()
    args.out.mkdir(parents=True, exist_ok=True)
    sides = [make_side(name, args, args.accept_length) for name in args.sides]
    found: dict[str, Any] = {}
    try:
        for side in sides:
            with serving([side]) as servers:
                for batch in args.batches:
                    with tempfile.TemporaryDirectory() as folder:
                        sizes = batch, args.context, args.tokens, args.steps
                        trace = profile(servers[side.name], *sizes, Path(folder))
                        key = f"{side.name}_{batch}"
                        found[key] = summary(trace, args.steps)
                        (args.out / f"trace_{key}.json.gz").write_bytes(trace.read_bytes())
                    show(key, found[key])
    except ServerFailed as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        (args.out / "trace.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
