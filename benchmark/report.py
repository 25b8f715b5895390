"""Markdown tables of a sweep, in the shape of the published ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmark.sides import FAMILIES, PEER
from benchmark.stats import median_and_spread

ORDER = ("none", "ngram", "eagle3", "builtin", PEER, "ours", *FAMILIES)
SHOWN = {
    "none": "no speculation",
    "builtin": "built-in DFLASH",
    PEER: "the peer's DFLASH",
    "ours": "sglang-dflash",
    "dspark": "DSpark",
    "dflash2": "DFlash 2",
    "domino": "Domino",
    "jetspec": "JetSpec",
    "dspine": "DSpine",
    "lilicorr": "LiLiCorr",
}
CONFIGURATION = (
    *("workload", "temperature", "filter", "block_size", "verify_width"),
    *("tp", "page_size", "attention_backend"),
)


def markdown(data: dict[str, Any]) -> str:
    """Speed, latency and acceptance: tables for each configuration."""
    parts = [_heading(data)]
    for configuration, points in groups(data["points"]):
        parts += [f"### {title(configuration)}", _speed(points), _latency(points)]
        parts.append(_acceptance(points))
    parts += [
        f"Left out: {', '.join(f'{k} {v}' for k, v in skipped.items() if v is not None)}."
        for skipped in data["skipped"]
    ]
    return "\n\n".join(parts) + "\n"


def groups(points: list[dict[str, Any]]) -> Iterable[tuple[tuple[Any, ...], list[dict[str, Any]]]]:
    """Points by configuration, each sorted by concurrency and side."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for point in points:
        found.setdefault(tuple(point.get(key) for key in CONFIGURATION), []).append(point)
    for configuration, same in sorted(found.items(), key=str):
        yield configuration, sorted(same, key=lambda p: (p["concurrency"], sides(same)[p["side"]]))


def sides(points: list[dict[str, Any]]) -> dict[str, int]:
    """The sides that occur, in the order in which the tables show them."""
    present = {point["side"] for point in points}
    return {
        side: i for i, side in enumerate([*ORDER, *sorted(present - {*ORDER})]) if side in present
    }


def title(configuration: tuple[Any, ...]) -> str:
    named = zip(CONFIGURATION[1:], configuration[1:], strict=True)
    return ", ".join([str(configuration[0]), *(f"{k} {v}" for k, v in named if v is not None)])


def speed(point: dict[str, Any]) -> float:
    """Median output tokens per second."""
    return median_and_spread([run["tok_s"] for run in point["repeats"]])[0]


def by_concurrency(points: list[dict[str, Any]]) -> dict[int, dict[str, dict[str, Any]]]:
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for point in points:
        found.setdefault(point["concurrency"], {})[point["side"]] = point
    return found


def _heading(data: dict[str, Any]) -> str:
    hardware, versions, settings = data["hardware"], data["versions"], data["settings"]
    machine = f"{hardware.get('gpu', hardware['cpu'])}, {hardware['cores']} cores"
    peer = f", the peer's {settings[PEER]}" if PEER in settings else ""
    text = (
        f"{settings['pair']} pair, {settings['dtype']}, {settings['threads']} threads a server, "
        f"{settings['max_tokens']} tokens at most, chat template {settings['chat_template']}; "
        f"{machine}; SGLang {versions['sglang']}{peer}, commit {versions['commit']}. Median of "
        f"{settings['repeats']} repeats, ± half of (max - min) / median."
    )
    if settings.get("simulate_survival"):  # older files have none
        profile = settings["simulate_survival"]
        return f"**SIMULATED survival of drafts, {profile}: answers mean nothing.** {text}"
    if settings["simulate_accept_length"]:
        length = settings["simulate_accept_length"]
        return f"**SIMULATED acceptance of {length} tokens a step: answers mean nothing.** {text}"
    return text


def _table(header: list[str], rows: Iterable[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _speed(points: list[dict[str, Any]]) -> str:
    present = list(sides(points))
    rows = []
    for concurrency, at in by_concurrency(points).items():
        counts = next(iter(at.values())).get("prompts", {})  # older files have none
        row = [str(concurrency), " + ".join(f"{n} {name}" for name, n in counts.items())]
        for side in present:
            row.append(_cell(at[side], at.get("none")) if side in at else "")
        rows.append(row)
    header = ["output tok/s at concurrency", "prompts"]
    return _table([*header, *(SHOWN.get(s, s) for s in present)], rows)


def _cell(point: dict[str, Any], baseline: dict[str, Any] | None) -> str:
    median, spread = median_and_spread([run["tok_s"] for run in point["repeats"]])
    text = f"{median:.0f} ± {spread * 50:.0f}%"
    if baseline is None or point["side"] == "none":
        return text
    return f"{text} ({median / speed(baseline):.2f}x)"


def _latency(points: list[dict[str, Any]]) -> str:
    keys = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")
    header = [
        "latency at concurrency",
        "",
        "first token p50 ms",
        "p99",
        "between tokens p50",
        "p99",
    ]
    rows = (
        [str(p["concurrency"]), SHOWN.get(p["side"], p["side"])]
        + [f"{p['latency'][key]:.2f}" if key in p["latency"] else "" for key in keys]
        for p in points
        if "latency" in p  # an interrupted point has none
    )
    return _table(header, rows)


def _acceptance(points: list[dict[str, Any]]) -> str:
    """The acceptance of each workload, in the last repeat at the lowest concurrency."""
    lowest = min(point["concurrency"] for point in points)
    rows = []
    for point in (p for p in points if p["concurrency"] == lowest):
        for workload, found in point["repeats"][-1]["by_workload"].items():
            right = found["accuracy"]
            positions = " ".join(f"{share:.2f}" for share in found["per_position"])
            judged = "" if right is None else f"{right:.3f}"
            name = SHOWN.get(point["side"], point["side"])
            rows.append([name, workload, f"{found['accept_length']:.2f}", judged, positions])
    return _table(["", "workload", "accept length", "accuracy", "accepted by position"], rows)
