"""Replicas of one target (`--enable-dp-attention`): two ranks, each with a device of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner

from sglang_dflash.settings.options import DRAFT_AHEAD
from sglang_dflash.tools.launch import free_port
from test.checkpoints import prompt
from test.ranks import on_two_ranks
from test.rehearsal.serving import Asked, N, all_kinds, answer, assert_exact, engine, forced

pytestmark = pytest.mark.ci
TURNS = 100  # of each replica, so many that all requests end
LATE = 20  # turns after which the quiet replica has requests


class Said(NamedTuple):
    idle: list[bool]  # forwards without a request, and whether a graph was replayed
    verified_idle: list[bool]  # those of them in which others verify
    replayed: set[tuple[int, int]]  # requests of a target's graph, and those that there were


def kinds_of(rank: int) -> dict[str, Asked]:
    if rank == 0:
        return all_kinds()
    return {"late": Asked(prompt(970, 9), N), "later": Asked(prompt(971, 30), N)}


def serve(rank: int, folder: Path, port: int, backend: str, flags: dict[str, Any]) -> Said:
    """Serve and check the requests of a replica, one of which is busy and the other quiet."""
    asked = answer(folder, kinds_of(rank))
    ranks: dict[str, Any] = {
        "tp_size": 2,
        "tp_rank": rank,
        "nccl_port": port,
        "disable_custom_all_reduce": True,
    }
    said, replay = Said([], [], set()), CudaGraphRunner.replay

    def watched(graphs: Any, batch: Any, *given: Any, **more: Any) -> Any:
        result = replay(graphs, batch, *given, **more)
        if not graphs.model_runner.is_draft_worker:
            said.replayed.add((graphs.bs, batch.batch_size))
        return result

    CudaGraphRunner.replay = watched
    ranks |= {"dp_size": 2, "enable_dp_attention": True, "max_running_requests": 8}
    with engine(folder, backend, **ranks, **flags) as run:
        take_part = run.worker.verifier.idle

        def idle(batch: Any) -> Any:
            result = take_part(batch)
            said.idle.append(result.can_run_cuda_graph)
            if not batch.is_extend_in_batch:
                said.verified_idle.append(result.can_run_cuda_graph)
            return result

        run.worker.verifier.idle = idle
        drafts, waiting = forced(run), list(asked)
        reqs: dict[str, Any] = {}
        for turn in range(TURNS):
            if waiting and turn >= LATE * rank and turn % 2 == 0:
                name = waiting.pop(0)
                reqs[name] = run.add(asked[name].ids, **asked[name].options)
                drafts.truth[reqs[name].rid] = asked[name].answer["ids"]
            run.step()
    assert_exact(reqs, asked)
    return said


@pytest.mark.parametrize(
    ("backend", "page", "ahead"), [("fa3", 1, "on"), ("triton", 16, "off"), ("flashinfer", 1, "on")]
)
def test_replicas(
    small: Path, monkeypatch: pytest.MonkeyPatch, backend: str, page: int, ahead: str
) -> None:
    """Verifies are graphs on both, as large as the larger batch; prefills are not."""
    monkeypatch.setenv(DRAFT_AHEAD, ahead)
    flags = {"page_size": page}
    busy, quiet = on_two_ranks(serve, small, free_port(), backend, flags, method="fork")
    assert len(quiet.verified_idle) > 5
    assert all(quiet.verified_idle)
    assert quiet.idle.count(True) == len(quiet.verified_idle) < len(quiet.idle)
    assert {(2, 0), (4, 0)} <= quiet.replayed
    assert any(0 < requests <= size // 2 for size, requests in quiet.replayed)
    assert {(2, 1), (4, 3)} <= busy.replayed


@pytest.mark.parametrize(
    "backend", ["fa3", *(pytest.param(b, marks=pytest.mark.full) for b in ("triton", "flashinfer"))]
)
def test_replicas_without_a_graph(small: Path, backend: str) -> None:
    """A batch is larger than the largest graph, so both replicas verify without one."""
    flags = {"cuda_graph_bs": [1]}
    busy, quiet = on_two_ranks(serve, small, free_port(), backend, flags, method="fork")
    assert {(1, 1)} == busy.replayed
    assert {True, False} == set(quiet.verified_idle)
