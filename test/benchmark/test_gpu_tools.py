"""What the rungs for a GPU make of answers and traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmark.exactness import is_near_tie, parting
from benchmark.trace import summary


def answer(ids: list[int], tops: list[list[list[Any]]] | None = None) -> dict[str, Any]:
    return {"output_ids": ids, "meta_info": {"output_top_logprobs": tops}}


def test_equal_answers_do_not_part():
    assert parting(answer([1, 2]), answer([1, 2])) is None


def test_the_margin_is_the_targets_own():
    """Of the two tokens at the first place that differs."""
    tops = [[[-0.1, 1, None]], [[-0.7, 2, None], [-0.75, 9, None]], [[-0.1, 3, None]]]
    parted = parting(answer([1, 9, 4]), answer([1, 2, 3], tops))
    assert parted == {"position": 1, "target": 2, "ours": 9, "margin": pytest.approx(0.05)}
    assert is_near_tie(parted, 0.25)
    assert not is_near_tie(parted, 0.05)
    assert not is_near_tie(parted, 0.0)  # fp32: no answer may part


@pytest.mark.parametrize("ours", [[1, 7, 3], [1]], ids=["unlikely", "shorter"])
def test_what_is_no_near_tie(ours):
    tops = [[[-0.1, 1, None]], [[-0.7, 2, None], [-0.75, 9, None]], [[-0.1, 3, None]]]
    parted = parting(answer(ours), answer([1, 2, 3], tops))
    assert parted is not None
    assert not is_near_tie(parted, 0.25)


def test_a_trace_is_summed_up(tmp_path: Path):
    """Per step; kernels that overlap keep the device busy once."""

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
