"""Plots the JSON files of `benchmark.sweep` and `benchmark.step_cost`, as PNG and SVG."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmark import report

COLOURS = {"none": "#888888", "builtin": "#d98032", "ours": "#2868b0"}
PARTS = ("draft", "verify", "context_kv", "host", "scheduler")
Draw = Callable[[Axes, list[dict[str, Any]]], None]


def speed_up(ax: Axes, points: list[dict[str, Any]]) -> None:
    """Speed-up over no speculation against concurrency.

    Bars span the repeats of a side, over the median of the baseline.
    """
    at = report.by_concurrency(points)
    for side in report.sides(points):
        shared = [c for c in at if side in at[c] and "none" in at[c]]
        ratios, spreads = [], []
        for concurrency in shared:
            base = report.speed(at[concurrency]["none"])
            speeds = [run["tok_s"] / base for run in at[concurrency][side]["repeats"]]
            ratios.append(median(speeds))
            spreads.append((median(speeds) - min(speeds), max(speeds) - median(speeds)))
        bars = list(zip(*spreads, strict=True)) or None  # below and above
        ax.errorbar(shared, ratios, yerr=bars, fmt="o-", capsize=3, **_style(side))
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(at), list(map(str, at)))
    ax.set(xlabel="concurrency", ylabel="speed-up")


def speed_against_latency(ax: Axes, points: list[dict[str, Any]]) -> None:
    """Output tok/s against the median time between tokens, one point per concurrency."""
    for side in report.sides(points):
        mine = [p for p in points if p["side"] == side and "itl_p50_ms" in p.get("latency", {})]
        gaps = [point["latency"]["itl_p50_ms"] for point in mine]
        ax.plot(gaps, [report.speed(point) for point in mine], "o-", **_style(side))
        for gap, point in zip(gaps, mine, strict=True):
            ax.annotate(str(point["concurrency"]), (gap, report.speed(point)), fontsize=7)
    ax.set(xlabel="median ms between tokens", ylabel="output tok/s")


def acceptance(ax: Axes, points: list[dict[str, Any]]) -> None:
    """Share of steps that accept each block position, at the lowest concurrency."""
    lines = {"builtin": "--", "ours": "-"}
    lowest = min(point["concurrency"] for point in points)
    for point in points:
        if point["concurrency"] != lowest:
            continue
        for i, (workload, found) in enumerate(point["repeats"][-1]["by_workload"].items()):
            if shares := found["per_position"]:
                label = f"{workload}, {report.SHOWN.get(point['side'], point['side'])}"
                line = lines.get(point["side"], ":")
                ax.plot(range(1, len(shares) + 1), shares, line, color=f"C{i}", label=label)
    ax.set(xlabel="block position", ylabel="share of steps that accept it", ylim=(0, 1))


def step_split(ax: Axes, rows: list[dict[str, Any]]) -> None:
    """The parts of a decode step's time, stacked."""
    names = [f"{row['side']} {row['batch']} x {row['context']}" for row in rows]
    below = [0.0] * len(rows)
    for part in PARTS:
        times = [row[f"{part}_ms"] for row in rows]
        ax.bar(names, times, bottom=below, label=part)
        below = [a + b for a, b in zip(below, times, strict=True)]
    ax.tick_params(axis="x", labelsize=6, rotation=90)
    ax.set(xlabel="side, batch x context", ylabel="ms a step")


def host_part(ax: Axes, rows: list[dict[str, Any]]) -> None:
    """The host's time in a decode step: what no forward hides."""
    for side in dict.fromkeys(row["side"] for row in rows):
        mine = [row for row in rows if row["side"] == side]
        names = [f"{row['batch']} x {row['context']}" for row in mine]
        ax.plot(names, [row["host_ms"] for row in mine], "o-", **_style(side))
    ax.set(xlabel="batch x context", ylabel="ms of the host a step")


def _style(side: str) -> dict[str, Any]:
    return {"label": report.SHOWN.get(side, side), "color": COLOURS.get(side)}


def _figure(draw: Draw, rows: list[dict[str, Any]], title: str) -> Figure:
    figure: Figure
    figure, ax = plt.subplots(figsize=(6, 4), layout="constrained")
    draw(ax, rows)
    ax.set_title(title, fontsize=8)
    ax.grid(alpha=0.3)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=7)
    return figure


def _machine(data: dict[str, Any]) -> str:
    hardware, versions = data["hardware"], data["versions"]
    device = hardware.get("gpu") or f"{hardware['cpu']}, {hardware['cores']} cores"
    return f"{device}; SGLang {versions['sglang']}, commit {versions['commit']}"


def figures(data: dict[str, Any]) -> dict[str, Figure]:
    """All figures of a file, by name."""
    if "rows" in data:
        if not data["rows"]:
            return {}
        title = f"A decode step; acceptance {data['versions']['acceptance']}\n{_machine(data)}"
        drawn: dict[str, Draw] = {"step": step_split, "host": host_part}
        return {name: _figure(draw, data["rows"], title) for name, draw in drawn.items()}
    found = {}
    settings = data["settings"]
    simulated = settings.get("simulate_survival") or settings["simulate_accept_length"]
    draws: dict[str, Draw]
    draws = {
        "speedup": speed_up,
        "latency": speed_against_latency,
        "acceptance": acceptance,
    }
    for number, (configuration, points) in enumerate(report.groups(data["points"])):
        title = report.title(configuration)
        if simulated:
            title = f"SIMULATED acceptance {simulated}: {title}"
        title = f"{title}\n{_machine(data)}"
        for name, draw in draws.items():
            found[f"{name}-{number}" if number else name] = _figure(draw, points, title)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.plot", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, help="folder; default: beside each file")
    args = parser.parse_args(argv)
    for file in args.files:
        folder = args.out or file.parent
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in figures(json.loads(file.read_text())).items():
            for kind in ("png", "svg"):
                path = folder / f"{file.stem}-{name}.{kind}"
                figure.savefig(path, dpi=150, metadata={"Date": None} if kind == "svg" else None)
                print(path)
            plt.close(figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
