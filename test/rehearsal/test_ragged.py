"""Verifies whose requests have different numbers of rows, in graphs that are keyed by all rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner

from sglang_dflash.settings.options import DRAFT_AHEAD, VERIFY_WIDTH
from test.checkpoints import prompt
from test.cuts import verify_any_rows
from test.inprocess import InProcess
from test.rehearsal.device.memory import LOG
from test.rehearsal.serving import (
    Asked,
    N,
    all_kinds,
    answer,
    assert_exact,
    engine,
    serve,
)

pytestmark = pytest.mark.ci

DOCS = Path(__file__).parents[2] / "docs" / "performance.md"
COUNTS = [8, 16, 24]  # rows of the graphs, below those of 4 whole blocks of 8
CUTS = {(requests, rows) for requests in (2, 3, 4) for rows in COUNTS if rows < 8 * requests}
FURTHER = [("fa3", 1, "on"), ("fa3", 16, "off"), ("triton", 16, "on"), ("triton", 1, "off")]


@pytest.fixture(scope="module")
def asked(small: Path) -> dict[str, Asked]:
    """All kinds, then four that are verified together for long enough to see every cut."""
    long = N | {"max_new_tokens": 64}
    return answer(
        small, all_kinds() | {f"long {i}": Asked(prompt(980 + i, 9), long) for i in range(4)}
    )


@pytest.fixture(autouse=True)
def auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VERIFY_WIDTH, "auto")


@pytest.mark.parametrize(
    ("backend", "page", "ahead"),
    [
        *[("fa3", 16, "on"), ("triton", 1, "on")],
        *[pytest.param(*further, marks=pytest.mark.full) for further in FURTHER],
    ],
)
def test_any_rows(
    small: Path,
    asked: dict[str, Asked],
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    page: int,
    ahead: str,
) -> None:
    """All kinds of requests, each cut at a place of its own, in every graph."""
    monkeypatch.setenv(DRAFT_AHEAD, ahead)
    replayed, replay = set(), CudaGraphRunner.replay

    def watched(graphs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = replay(graphs, batch, *args, **kwargs)
        if not graphs.model_runner.is_draft_worker:
            block = batch.spec_info.block
            replayed.add((len(block.slots), graphs.bs * graphs.num_tokens_per_bs))
            assert graphs.model_runner.attn_backend is graphs.attn_backend
            assert (graphs.num_tokens_per_bs == 1) == (block.ragged is not None)
        return result

    monkeypatch.setattr(CudaGraphRunner, "replay", watched)
    with engine(small, backend, page_size=page) as run:
        replayed.clear()  # those that were timed at startup
        verified = verify_any_rows(run.worker)
        assert_exact(serve(run, asked), asked)
    assert verified >= CUTS
    assert replayed >= CUTS


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [pytest.param("fa3", "triton", marks=pytest.mark.full), ("triton", "flashinfer")],
)
def test_two_backends(small: Path, prefill: str, decode: str) -> None:
    """The prefill backend verifies, and the other one drafts."""
    asked = answer(small, {str(i): Asked(prompt(957 + i, 20), N) for i in range(3)})
    backends: dict[str, Any] = {
        "prefill_attention_backend": prefill,
        "decode_attention_backend": decode,
    }
    with engine(small, None, **backends) as run:
        assert run.worker.graphs.ragged
        verify_any_rows(run.worker)
        assert_exact(serve(run, asked), asked)


def test_graphs_are_those_of_its_rows(small: Path) -> None:
    with engine(small, "fa3", cuda_graph_bs=[2, 4]) as run:
        graphs = run.worker.graphs
        assert sorted(graphs._cut[1].graphs) == COUNTS
        assert [graphs.options(requests) for requests in (1, 2, 3, 4, 5)] == [
            [8],
            [8, 16],
            [8, 16, 24],
            [8, 16, 24, 32],
            [40],  # more requests than a graph has room for
        ]


@pytest.mark.parametrize("backend", ["fa3", "triton"])
def test_the_host_waits_once(small: Path, backend: str) -> None:
    """It knows how many rows there are, and neither waits for the draft nor for the cut."""
    with engine(small, backend, cuda_graph_bs=[4]) as run:
        seconds_of_rows(run)
        for i in range(4):
            run.add(prompt(970 + i, 20), **N | {"max_new_tokens": 80})
        for _ in range(6):
            run.step()
        rows = []
        choose = run.worker.verify_width.choose

        def watched(*given: Any) -> Any:
            choice = choose(*given)
            rows.append(choice.block.rows)
            return choice

        run.worker.verify_width.choose = watched
        for _ in range(3):
            LOG.clear()
            run.step()
            assert LOG.waits == ["step/copies.py:wait event"]
            assert LOG.replays == 2
            counts = f"{len(LOG.launches)} launches and {len(LOG.copies)} copies"
            assert f"{counts} on {backend}" in " ".join(DOCS.read_text().split())
        assert rows == [8] * 3  # the drafts of a draft that was not trained are wrong


def seconds_of_rows(run: InProcess) -> None:
    """Let a step take as long as its rows, whatever it takes on this machine."""
    run.worker.verify_width._step_times.at = lambda _, options: 8.0 + np.array(options)


def test_one_request_at_a_time(small: Path) -> None:
    """Its rows are free, so there are no graphs of fewer."""
    one = answer(small, {"one": Asked(prompt(1, 5), N)})
    with engine(small, "fa3", cuda_graph_bs=[1], max_running_requests=1) as run:
        assert not run.worker.graphs.ragged
        assert_exact(serve(run, one), one)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["fa3", "triton"])
def test_seeds(small: Path, backend: str) -> None:
    """SGLang's own draws by seed need to know on the host whose each row is."""
    filters: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 0.9}]
    seeded = {
        str(i): Asked(prompt(940 + i, 12), N | {"temperature": 0.9, "sampling_seed": i} | more)
        for i, more in enumerate(filters)
    }
    flags: dict[str, Any] = {"enable_deterministic_inference": True}
    asked = answer(small, seeded, **flags)
    with engine(small, backend, **flags) as run:
        assert not run.worker.graphs.ragged
        verify_any_rows(run.worker)
        assert_exact(serve(run, asked), asked)
