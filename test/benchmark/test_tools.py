"""Tests of the benchmark's calculations, without a server."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from benchmark import dummy, plot, report, workloads
from benchmark.load import Answer, _request
from benchmark.sides import make_side
from benchmark.stats import median_and_spread, percentile
from benchmark.step_cost import split, tokens_of
from benchmark.sweep import Results, Sweep, acceptance, parse, settings_at, settings_of
from benchmark.workloads import Prompt
from sglang_dflash.checkpoint import load_config
from sglang_dflash.checkpoint.fit import Target, misfits
from sglang_dflash.tiny.prompts import held_out

floats = st.lists(st.floats(0, 1e6), min_size=1, max_size=30)


@given(floats, st.integers(0, 100))
def test_percentile_is_numpys(values: list[float], p: int) -> None:
    assert percentile(values, p) == pytest.approx(np.percentile(values, p))


def test_spread_is_relative_to_the_median() -> None:
    assert median_and_spread([90, 100, 120]) == (100, 0.3)


def test_acceptance_by_position() -> None:
    """Two requests, 4 steps: two accept 2 drafts, one accepts 1, one none."""
    first = {"spec_verify_ct": 3, "spec_correct_drafts_histogram": [1, 1, 1]}
    second = {"spec_verify_ct": 1, "spec_correct_drafts_histogram": [0, 0, 1]}
    found = acceptance([Answer("", 1 + 6, first), Answer("", 1 + 3, second)])
    assert found == {"accept_length": 9 / 4, "per_position": [0.75, 0.5]}
    assert acceptance([Answer("", 9)]) == {"accept_length": 1.0, "per_position": []}


def test_parts_of_a_step_add_up() -> None:
    step = {"step_ms": 10.0, "worker_ms": 8.0, "draft_ms": 2.0, "verify_ms": 4.0}
    parts = split(step | {"context_kv_ms": 1.0})
    assert parts["host"] == 1.0
    assert parts["scheduler"] == 2.0
    overlapped = split(step | {"context_kv_ms": 3.0, "worker_ms": 1.0})
    assert overlapped["host"] == 0.0
    assert overlapped["scheduler"] == 1.0


def test_a_request_ends_with_a_whole_step() -> None:
    assert tokens_of(100, 6.36, 16) == pytest.approx(1 + 636, abs=1)


# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["word", "json", "code"])
def test_bundled_prompts_know_their_answers(kind: str) -> None:
    name, prompts = workloads.load(kind, 3, seed=1)
    assert (name, len(prompts)) == (kind, 3)
    for prompt, example in zip(prompts, held_out(kind, 3, 1), strict=True):
        if kind == "code":
            assert prompt.is_right is None
            assert not prompt.chat
        else:
            assert prompt.is_right is not None
            assert prompt.is_right(example.answer)
            assert not prompt.is_right(example.answer[:-4])


def test_more_bundled_prompts_than_there_are_end_the_run() -> None:
    with pytest.raises(SystemExit, match="1000 held-out prompts of kind word: only 256 exist"):
        workloads.load("word", 1000, seed=1)


def test_jsonl_in_a_public_sets_fields(tmp_path: Path) -> None:
    file = tmp_path / "gsm8k.jsonl"
    rows = [{"question": "How many?", "answer": "2 + 3 = 5\n#### 1,005"}, {"question": "Why?"}]
    file.write_text("\n".join(map(json.dumps, rows)))
    name, (first, second) = workloads.load(f"gsm8k={file}", 8, seed=1)
    assert name == "gsm8k"
    assert first.text.startswith("How many?\nPlease reason")
    assert first.is_right is not None
    assert first.is_right("so \\boxed{1005}.")
    assert first.is_right("1 and then 1005")
    assert not first.is_right("1005 and then 1")
    assert second.is_right is None


def test_jsonl_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    rows = [{"prompt": "p", "answer": "\\frac{1}{2}"}, {"turns": ["one", "two"]}, {"prompt": "r"}]
    file.write_text("\n".join(map(json.dumps, rows)))
    _, (first, second) = workloads.load(f"own={file}", 2, seed=1)
    assert (first.text, second.text) == ("p", "one")
    assert first.is_right is not None
    assert first.is_right("it is \\boxed{\\frac{1}{2}}")
    assert not first.is_right("it is \\boxed{\\frac{1}{3}}")
    with pytest.raises(SystemExit, match="No workload"):
        workloads.load("nothing", 1, seed=1)


# ---------------------------------------------------------------------------------------------


def point(side: str, concurrency: int, speeds: list[float]) -> dict[str, Any]:
    shares = [] if side == "none" else [0.8, 0.5]
    found = {"accept_length": 2.3, "per_position": shares, "accuracy": 0.75}
    return {
        **{"workload": "word", "temperature": 0.0, "block_size": None, "tp": 1, "page_size": 1},
        **{
            "verify_width": None,
            "attention_backend": None,
            "side": side,
            "concurrency": concurrency,
            "prompts": {"word": 11},
        },
        "repeats": [{"tok_s": s, "by_workload": {"word": found}} for s in speeds],
        "latency": {"ttft_p50_ms": 9.0, "ttft_p99_ms": 12.0, "itl_p50_ms": 2.0, "itl_p99_ms": 5.0},
    }


@pytest.fixture
def sweep_file() -> dict[str, Any]:
    points = [point("none", 1, [100, 110, 90]), point("ours", 1, [300, 330, 310])]
    points += [point("none", 8, [400, 400, 400]), point("ours", 8, [800, 820, 780])]
    settings = {"pair": "bundled", "dtype": "float32", "threads": 2, "max_tokens": 64}
    settings |= {"chat_template": {}, "repeats": 3, "simulate_accept_length": 0.0}
    return {
        "settings": settings,
        "hardware": {"cpu": "a CPU", "cores": 2},
        "versions": {"sglang": "0.5.13.post1", "commit": "abc"},
        "points": points,
        "skipped": [{"side": "ngram", "reason": "needs a GPU"}],
    }


def test_table_shows_medians_and_speed_up(sweep_file: dict[str, Any]) -> None:
    table = report.markdown(sweep_file)
    assert "| 1 | 11 word | 100 ± 10% | 310 ± 5% (3.10x) |" in table
    assert "| 8 | 11 word | 400 ± 0% | 800 ± 2% (2.00x) |" in table
    assert "| sglang-dflash | word | 2.30 | 0.750 | 0.80 0.50 |" in table
    assert "needs a GPU" in table
    assert "SIMULATED" not in table
    assert "SGLang 0.5.13.post1, commit abc" in table
    sweep_file["settings"]["peer"] = "0.5.99"
    assert "SGLang 0.5.13.post1, the peer's 0.5.99, commit abc" in report.markdown(sweep_file)
    sweep_file["settings"]["simulate_accept_length"] = 6.36
    assert report.markdown(sweep_file).startswith("**SIMULATED acceptance of 6.36")


def test_a_peer_is_another_sglang(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its release is a setting: a later run does not go on with another one."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    info = tmp_path / "sglang-0.5.99.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: sglang\nVersion: 0.5.99\n")
    given = ["--out", "x.json", "--sides", "ours,peer"]
    with pytest.raises(SystemExit):
        parse(given)
    assert "the side peer needs --peer PYTHON" in capsys.readouterr().err
    args = parse([*given, "--peer", str(python)])
    assert settings_of(args)["peer"] == "0.5.99"
    args.page_size, args.tp = 1, 1
    args.block_size = args.verify_width = args.attention_backend = None
    ours, peer = (make_side(name, args, accept_length=6.36) for name in args.sides)
    assert (ours.python, peer.python) == (sys.executable, str(python))
    width = ["--speculative-dflash-verify-width", "full"]
    assert peer.flags == [flag for flag in ours.flags if flag not in width]
    assert peer.environment["SGLANG_SIMULATE_ACC_LEN"] == "6.36"
    assert not {"dflash", "dflash_guard"} & {*peer.environment["SGLANG_PLUGINS"].split(",")}


def test_a_fleet_is_a_side() -> None:
    """Its settings are those that JSON gives back, so a later run goes on."""
    fleet = ["--base-url", "two=http://a:1/,http://b:2", "--base-url", "one=http://a:1"]
    args = parse(["--out", "x.json", "--sides", "one,two", *fleet])
    settings = settings_of(args)
    assert settings["base_url"] == {"two": ["http://a:1", "http://b:2"], "one": ["http://a:1"]}
    assert json.loads(json.dumps(settings["base_url"])) == settings["base_url"]


@pytest.mark.parametrize("fleet", ["http://a:1", "two=", "=http://a:1"])
def test_a_fleet_without_a_name_is_refused(fleet: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--out", "x.json", "--base-url", fleet])
    assert "is not SIDE=URL" in capsys.readouterr().err


def test_any_beginning_of_a_mix_has_equal_parts(tmp_path: Path) -> None:
    """Also at concurrency 1, where `--per-slot` leaves few prompts."""
    args = parse(["--out", "x.json", "--mix", "--prompts", "4", "--per-slot", "2"])
    sweep = Sweep(args, Results(tmp_path / "x.json", {}), Console())
    [name] = sweep._sets
    for concurrency, expected in [(1, 1), (3, 2), (32, 4)]:
        chosen = sweep._prompts({"workload": name, "concurrency": concurrency})
        counts = Counter(prompt.workload for prompt in chosen)
        assert counts == dict.fromkeys(("word", "json", "code"), expected)


def test_a_sweep_goes_on_where_it_stopped(tmp_path: Path) -> None:
    file = tmp_path / "sweep.json"
    at = {"workload": "word", "concurrency": 4}
    first = Results(file, {"seed": 1})
    first.add("points", at | {"side": "none", "repeats": [1], "latency": {}})
    first.add("points", at | {"side": "ours", "repeats": [1]})  # interrupted
    again = Results(file, {"seed": 1})
    assert again.has(at, "none")
    assert not again.has(at, "ours")
    assert not again.has(at | {"concurrency": 8}, "none")
    assert not Results(file, {"seed": 2}).has(at, "none")


def test_plots_from_json_alone(sweep_file: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps(sweep_file))
    row = {"side": "ours", "batch": 1, "context": 64} | {f"{part}_ms": 1.0 for part in plot.PARTS}
    steps = {"rows": [row], "hardware": sweep_file["hardware"]}
    steps["versions"] = sweep_file["versions"] | {"acceptance": "SIMULATED: 6.36"}
    (tmp_path / "step.json").write_text(json.dumps(steps))
    assert plot.main([str(tmp_path / "sweep.json"), str(tmp_path / "step.json")]) == 0
    drawn = {file.stem for file in tmp_path.glob("*.png")}
    assert drawn == {"sweep-speedup", "sweep-latency", "sweep-acceptance", "step-step", "step-host"}
    assert drawn == {file.stem for file in tmp_path.glob("*.svg")}
    assert "SIMULATED" in (tmp_path / "step-step.svg").read_text()
    assert "a CPU, 2 cores" in (tmp_path / "sweep-speedup.svg").read_text()
    assert all(file.stat().st_size > 2000 for file in tmp_path.glob("*.png"))


# ---------------------------------------------------------------------------------------------


def test_dummy_has_the_shape_of_qwen3_8b(tmp_path: Path) -> None:
    assert dummy.main([str(tmp_path)]) == 0
    draft = load_config(str(tmp_path / "draft"))
    assert (draft.block_size, draft.num_layers, draft.mask_token_id) == (16, 5, 151669)
    assert list(draft.target_layer_ids) == [1, 9, 17, 25, 33]
    target = json.loads((tmp_path / "target" / "config.json").read_text())
    assert (target["num_hidden_layers"], target["hidden_size"]) == (36, 4096)
    assert (target["vocab_size"], target["intermediate_size"]) == (151936, 12288)
    words = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "target" / "tokenizer.json"))
    assert words.decode([5, 2047, 2048, 151935]).endswith(" t2048 t151935")
    assert len(words) == target["vocab_size"]
    shape = Target("target", 36, target["hidden_size"], target["vocab_size"])
    assert misfits(draft, shape) == []


def test_filters_are_an_axis_of_sampled_requests(tmp_path: Path) -> None:
    """Each point says its own, and its requests have it."""
    filters = '{"top_p": 0.9, "top_k": 20}'
    flags = ["--out", str(tmp_path / "x.json"), "--data", "word", "--concurrency", "1"]
    args = parse([*flags, "--temperature", "0,0.8", "--filter", filters])
    results = Results(args.out, settings_of(args))
    points = Sweep(args, results, Console())._todo({})
    found = {(point["temperature"], point["filter"]) for point in points}
    assert found == {(0.0, None), (0.8, None), (0.8, filters)}
    settings = settings_at(args, 1, 0.8, filters)
    _, body = _request(Prompt("word", "How many?"), settings)
    assert (body["top_p"], body["top_k"], body["temperature"]) == (0.9, 20, 0.8)
    assert "top_p" not in _request(Prompt("word", "?"), settings_at(args, 1, 0.8))[1]
