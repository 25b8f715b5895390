"""The benchmark's commands with real servers and the bundled pair."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import requests

from benchmark import step_cost, sweep
from benchmark.sides import make_side, serving
from sglang_dflash.tiny.prompts import held_out
from test.servers import chat

SMALL = ["--threads", "1", "--max-total-tokens", "2048"]
TIMES = ("step", "host", "scheduler", "draft", "verify", "context_kv")


@pytest.mark.full
@pytest.mark.parametrize("sides", ["ours", "ours,builtin"])
def test_step_cost_splits_the_steps(capsys: pytest.CaptureFixture[str], sides: str) -> None:
    small = [*SMALL, "--batches", "1,3", "--contexts", "64,1024", "--steps", "12", "--repeats", "1"]
    small += ["--sides", sides, "--accept-length", "4.5"]
    assert step_cost.main([*small, "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out.splitlines()[-1])
    assert "SIMULATED" in captured.err
    assert "SIMULATED" in result["versions"]["acceptance"]
    assert set(result) == {"rows", "hardware", "versions"}
    points = {(row["side"], row["batch"], row["context"]) for row in result["rows"]}
    fitting = [(1, 64), (3, 64), (1, 1024)]
    assert points == {(side, *point) for side in sides.split(",") for point in fitting}
    assert "Left out: batch 3 at context 1024" in captured.err
    for row in result["rows"]:
        assert set(row) == {
            "side",
            "batch",
            "context",
            "accept_length",
            *(f"{t}_ms" for t in TIMES),
        }
        assert all(row[f"{part}_ms"] > 0 for part in TIMES)
        parts = sum(row[f"{part}_ms"] for part in TIMES[1:])
        assert parts == pytest.approx(row["step_ms"], rel=0.5)  # medians, on a busy machine
        assert row["accept_length"] == pytest.approx(4.5, abs=1 / 12)


@pytest.mark.parametrize(
    "widths",
    [
        pytest.param("full", marks=pytest.mark.ci),
        pytest.param("full,4,auto", marks=pytest.mark.full),
    ],
)
def test_simulated_survival(tmp_path: Path, widths: str) -> None:
    """Drafts are accepted as published, as far as they are verified.

    The bounds are those of 1,152 tokens.
    """
    out = tmp_path / "survival.json"
    given = ["--sides", "ours", "--simulate-survival", "math_500", "--verify-width", widths]
    load = ["--mix", "--ignore-eos", "--prompts", "4", "--max-tokens", "96", "--repeats", "1"]
    load += ["--concurrency", "4", "--threads", "1", "--max-total-tokens", "4096"]
    assert sweep.main([*given, *load, "--out", str(out)]) == 0
    lengths = {}
    for point in json.loads(out.read_text())["points"]:
        (run,) = point["repeats"]
        assert run["tokens"] == 12 * 96
        assert run["per_position"][0] == pytest.approx(0.9, abs=0.07)
        lengths[point["verify_width"]] = run["accept_length"]
    assert lengths["full"] == pytest.approx(7.66, rel=0.15)
    if widths != "full":
        assert lengths["4"] == pytest.approx(1 + 0.9 + 0.9 * 0.87 + 0.9 * 0.87**2, rel=0.08)
        assert lengths["4"] < lengths["auto"] < 7.66 * 1.15
    assert "SIMULATED survival of drafts, math_500" in out.with_suffix(".md").read_text()


@pytest.mark.full
def test_an_interrupted_sweep_keeps_its_points_and_leaves_no_server(tmp_path: Path) -> None:
    out = tmp_path / "sweep.json"
    command = [
        sys.executable,
        "-m",
        "benchmark.sweep",
        "--out",
        str(out),
        "--sides",
        "ours",
        *SMALL,
    ]
    command += ["--data", "word", "--prompts", "4", "--repeats", "1", "--concurrency", "1,2,4"]
    command += ["--max-tokens", "96", "--ignore-eos"]
    run = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        # A background job of a shell, such as this test may be, ignores SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        while not out.exists():
            assert run.poll() is None
            time.sleep(0.02)
        family = psutil.Process(run.pid).children(recursive=True)
        run.send_signal(signal.SIGINT)
        table, _ = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 130
    kept = json.loads(out.read_text())["points"]
    assert 1 <= len(kept) < 3
    assert "output tok/s at concurrency" in table
    assert len(family) >= 3
    assert not [process for process in family if process.is_running()]


@pytest.mark.full
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_builtin_answers_as_the_target_does(page_size: int, tp: int) -> None:
    args = step_cost.parse([*SMALL, "--page-size", str(page_size), "--tp", str(tp)])
    sides = [make_side("none", args), make_side("builtin", args)]
    prompts = [chat(example.prompt) for example in held_out("word", 8, seed=2)]
    with serving(sides) as servers:
        said = {}
        for name, server in servers.items():
            body = {"text": prompts, "sampling_params": {"temperature": 0, "max_new_tokens": 64}}
            answers = requests.post(f"{server.url}/generate", json=body, timeout=600).json()
            said[name] = [answer["output_ids"] for answer in answers]
    assert said["builtin"] == said["none"]
