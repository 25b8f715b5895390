"""Tests of the GPU stages: how they end and continue, and how they read answers and traces."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from benchmark.exactness import is_near_tie, parting
from benchmark.trace import summary


def answer(ids: list[int], tops: list[list[list[Any]]] | None = None) -> dict[str, Any]:
    return {"output_ids": ids, "meta_info": {"output_top_logprobs": tops}}


ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/bash
case "$*" in
*--peer*) while [ "$1" != --peer ]; do shift; done
  exec "$2" -c 'import os; print(os.environ["PYTHONPATH"], os.environ["PATH"])' ;;
*pytest*) echo "{said}"; exit {status} ;;
esac
exec {python} "$@"
"""


def climb(
    folder: Path, *stages: str, status: int, said: str = "what it said", **variables: str
) -> subprocess.CompletedProcess[str]:
    """A dry run in which each pytest command of a stage prints `said` and ends with `status`."""
    python = folder / "python"
    python.write_text(PYTHON.format(said=said, status=status, python=sys.executable))
    python.chmod(0o755)
    given = {"PYTHON": str(python), "OUT": str(folder / "out"), "DRY_RUN": "1", "COMMIT": "abc"}
    command = ["benchmark/gpu.sh", *stages]
    environment = os.environ | given | variables
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_a_stage_that_fails_says_what_to_read(tmp_path: Path) -> None:
    done = climb(tmp_path, "quantised", status=3)
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if "status 3" in line]
    assert f"read logs/quantised.log of {tmp_path / 'out'}/logs.tar.gz" in line
    with tarfile.open(tmp_path / "out" / "logs.tar.gz") as logs:
        log = logs.extractfile("logs/quantised.log")
        assert log is not None
        assert log.read() == b"what it said\n"


def test_a_stage_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Only in the same folder and at the same commit."""
    assert climb(tmp_path, "quantised", status=3).returncode == 1
    assert climb(tmp_path, "quantised", status=0).returncode == 0
    again = climb(tmp_path, "quantised", status=3)
    assert again.returncode == 0
    assert "quantised DRY_RUN: done before" in again.stdout
    other = climb(tmp_path, "quantised", status=0, COMMIT="def")
    assert (other.returncode, other.stdout) == (1, "")
    assert "holds results of commit abc, this is def" in other.stderr


def test_a_part_of_a_stage_is_not_the_stage(tmp_path: Path) -> None:
    """A run with ONLY does not complete its stage, and the logs of another stage are kept."""
    assert climb(tmp_path, "quantised", status=0).returncode == 0
    assert climb(tmp_path, "tests", status=0, ONLY="one").returncode == 0
    whole = climb(tmp_path, "tests", status=3)
    assert (whole.returncode, "done before" in whole.stdout) == (1, False)
    with tarfile.open(tmp_path / "out" / "logs.tar.gz") as logs:
        assert {"logs/quantised.log", "logs/tests.log"} <= {*logs.getnames()}


@pytest.mark.parametrize("commit", ["unknown", "abc-dirty"])
def test_what_no_commit_names_is_not_gone_on_with(tmp_path: Path, commit: str) -> None:
    assert climb(tmp_path, "quantised", status=0, COMMIT=commit).returncode == 0
    again = climb(tmp_path, "quantised", status=0, COMMIT=commit)
    assert again.returncode == 1
    assert "give another OUT" in again.stderr


def test_the_peer_has_its_own_packages(tmp_path: Path) -> None:
    """None of ours, which stand first otherwise; and what was compiled ahead for it."""
    peer = tmp_path / "peer"
    done = climb(tmp_path, "peer", status=0, PEER=str(peer))
    assert done.returncode == 0
    assert done.stdout.startswith(f"{peer} {peer}/.jit-bin:{os.environ['PATH']}\n")


def test_there_is_no_such_stage(tmp_path: Path) -> None:
    """Nothing runs, not even the stages before it."""
    done = climb(tmp_path, "quantised", "kernel", status=0)
    assert (done.returncode, done.stdout) == (2, "")
    assert "No stage kernel" in done.stderr


def test_tests_that_passed_are_not_run_again(tmp_path: Path) -> None:
    """Except a test that passed and then ended with an error. With none left, a stage is done."""
    lines = "[gw0] [ 9%] PASSED test/a.py::one[x-1]", "[gw1] [ 9%] PASSED test/a.py::two"
    said = [*lines, "[gw1] [ 9%] ERROR test/a.py::two"]
    assert climb(tmp_path, "tests", status=1, said="\n".join(said)).returncode == 1
    assert (tmp_path / "out" / "passed").read_text() == "--deselect=test/a.py::one[x-1]\n"
    assert climb(tmp_path, "tests", status=5).returncode == 0


def test_equal_answers_do_not_part() -> None:
    assert parting(answer([1, 2]), answer([1, 2])) is None


def test_the_margin_is_the_targets_own() -> None:
    """The margin is that of the two tokens at the first place that differs."""
    tops = [[[-0.1, 1, None]], [[-0.7, 2, None], [-0.75, 9, None]], [[-0.1, 3, None]]]
    parted = parting(answer([1, 9, 4]), answer([1, 2, 3], tops))
    assert parted == {"position": 1, "target": 2, "ours": 9, "margin": pytest.approx(0.05)}
    assert is_near_tie(parted, 0.25)
    assert not is_near_tie(parted, 0.05)
    assert not is_near_tie(parted, 0.0)  # fp32: no answer may part


@pytest.mark.parametrize("ours", [[1, 7, 3], [1]], ids=["unlikely", "shorter"])
def test_what_is_no_near_tie(ours: list[int]) -> None:
    tops = [[[-0.1, 1, None]], [[-0.7, 2, None], [-0.75, 9, None]], [[-0.1, 3, None]]]
    parted = parting(answer(ours), answer([1, 2, 3], tops))
    assert parted is not None
    assert not is_near_tie(parted, 0.25)


def test_a_trace_is_summed_up(tmp_path: Path) -> None:
    """Figures are per step. Kernels that overlap count once as busy time."""

    def event(category: str, name: str, begin: float, length: float) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": length}

    events = [
        event("kernel", "gemm", 10, 20),
        event("kernel", "gemm", 20, 20),
        event("gpu_memcpy", "copy", 60, 4),
        event("cuda_runtime", "cudaLaunchKernel", 0, 3),
        event("cpu_op", "aten::mm", 0, 9),
        {"ph": "M", "name": "metadata"},
    ]
    trace = tmp_path / "a.json.gz"
    with gzip.open(trace, "wt") as file:
        json.dump({"traceEvents": events}, file)
    found = summary(trace, steps=2)
    assert (found["span_us"], found["busy_us"]) == (27.0, 17.0)
    assert found["kernels"][0] == {"name": "gemm", "count": 1.0, "us": 20.0}
    assert found["host_calls"] == [{"name": "cudaLaunchKernel", "count": 0.5, "us": 1.5}]
