"""SGLang's hierarchical cache: a prefix that comes back from host memory has the draft's KV."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.managers import cache_controller
from sglang.srt.managers.io_struct import AttachHiCacheStorageReqInput
from sglang.srt.mem_cache import memory_pool_host

from sglang_dflash.options import DRAFT_AHEAD
from test.inprocess import InProcess
from test.rehearsal.mutation import mutate
from test.rehearsal.serving import Asked, answer, assert_drafts, assert_exact, engine, recorded
from test.worker.conftest import prompt

PREFIX = prompt(970, 96)
N = {"max_new_tokens": 8, "ignore_eos": True}
ASKED = {"first": Asked(PREFIX, N), "again": Asked(PREFIX + prompt(971, 5), N)}
OTHERS = [prompt(972 + i, 110) for i in range(3)]  # more than the device's KV


@pytest.fixture(autouse=True)
def any_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_pool_host, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)


@pytest.fixture(autouse=True)
def late_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies from the host are made only when somebody waits for their layer."""
    queued: list[Callable[[], None]] = []
    load = memory_pool_host.MHATokenToKVPoolHost.load_to_device_per_layer
    complete = cache_controller.LayerLoadingEvent.complete
    wait = cache_controller.LayerLoadingEvent.wait

    def load_late(pool: Any, *args: Any) -> None:
        queued.append(lambda: load(pool, *args))

    def complete_late(event: Any, layer: int) -> None:
        complete(event, layer)
        loads = event.__dict__.setdefault("loads", {})
        loads[layer], queued[:] = list(queued), []

    def wait_for(event: Any, layer: int) -> None:
        wait(event, layer)
        for earlier in range(layer + 1):  # in the order of the stream
            for make in event.__dict__.get("loads", {}).pop(earlier, ()):
                make()

    monkeypatch.setattr(
        memory_pool_host.MHATokenToKVPoolHost, "load_to_device_per_layer", load_late
    )
    monkeypatch.setattr(cache_controller.LayerLoadingEvent, "complete", complete_late)
    monkeypatch.setattr(cache_controller.LayerLoadingEvent, "wait", wait_for)


def with_host_cache(small: Path, backend: str, **flags: Any) -> InProcess:
    usual: dict[str, Any] = {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 4.0,
        "max_total_tokens": 384,
        "max_running_requests": 1,
        "cuda_graph_bs": [1],
        "page_size": 16,
    }
    return engine(small, backend, **usual | flags)


def serve(run: InProcess, between: list[list[int]]) -> tuple[dict[str, Any], Any]:
    """Serve the prefix, other prompts, and the prefix again. Returns requests and drafts."""
    drafts = recorded(run)
    reqs = {"first": run.add(ASKED["first"].ids, **N)}
    run.run(reqs["first"])
    for ids in between:
        run.generate(ids, **N)
    reqs["again"] = run.add(ASKED["again"].ids, **N)
    run.run(reqs["again"])
    return reqs, drafts


def from_host(small: Path, backend: str, **flags: Any) -> tuple[dict[str, Any], Any]:
    """The prefix is evicted from the device, and loaded from the host."""
    with with_host_cache(small, backend, **flags) as run:
        reqs, drafts = serve(run, [PREFIX, *OTHERS])  # some policies copy what was hit once
    assert reqs["again"].cached_tokens_host >= 80, reqs["again"].cached_tokens_host
    return reqs, drafts


def trace(reqs: dict[str, Any], drafts: Any) -> Any:
    """The blocks that the second request drafted, and how many of its drafts were accepted."""
    again = reqs["again"]
    blocks = [(at, block) for rid, at, block in drafts if rid == again.rid]
    return blocks, again.spec_verify_ct, list(again.spec_correct_drafts_histogram)


@pytest.fixture(scope="module")
def kept(small: Path) -> Any:
    """The trace where the prefix stays on the device."""
    with engine(small, "fa3", max_running_requests=1, cuda_graph_bs=[1]) as run:
        reqs, drafts = serve(run, [])
    assert reqs["again"].cached_tokens >= 96
    return trace(reqs, drafts)


FULL = pytest.mark.full
DIRECT = {"hicache_io_backend": "direct"}
CASES = [
    ("fa3", {}),
    ("flashinfer", {}),
    pytest.param("triton", {}, marks=FULL),
    pytest.param("fa3", {"page_size": 1}, marks=FULL),
    pytest.param("fa3", {"hicache_mem_layout": "page_first_direct"}, marks=FULL),
    pytest.param("flashinfer", {"page_size": 1}, marks=FULL),
    pytest.param("flashinfer", {"hicache_mem_layout": "page_first"}, marks=FULL),
    pytest.param("flashinfer", DIRECT, marks=FULL),
    pytest.param("flashinfer", {"hicache_write_policy": "write_back"}, marks=FULL),
    pytest.param("flashinfer", {"hicache_write_policy": "write_through_selective"}, marks=FULL),
]


@pytest.mark.parametrize(("backend", "flags"), CASES, ids=str)
def test_drafts_after_a_hit_in_host_memory(
    small: Path, kept: Any, backend: str, flags: dict[str, Any]
) -> None:
    """Tokens, drafts and accepted drafts are those of a prefix that was never evicted."""
    reqs, drafts = from_host(small, backend, **flags)
    assert_exact(reqs, answer(small, ASKED))
    assert_drafts(small, reqs, drafts)
    assert trace(reqs, drafts) == kept


def test_drafts_from_the_targets_pool(
    small: Path, kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are still right, but the host's copy of the draft's KV is missing."""
    pool = "runner.token_to_kv_pool,"
    mutate(monkeypatch, "host_cache:draft_kv_pool", pool, f"draft_worker.model_{pool}")
    reqs, drafts = from_host(small, "fa3")
    assert_exact(reqs, answer(small, ASKED))
    assert trace(reqs, drafts) != kept


def test_a_prefill_that_does_not_wait(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = "batch.hicache_consumer_index"
    mutate(monkeypatch, "runtime.prefill:Prefill.run", index, "-1")
    reqs, _ = from_host(small, "fa3")
    with pytest.raises(AssertionError):
        assert_exact(reqs, answer(small, ASKED))


def test_host_memory_and_storage(small: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The log counts both pools, and a running server is given no storage behind them."""
    with with_host_cache(small, "fa3", disable_cuda_graph=True, log_level="info") as run:
        controller = run.scheduler.tree_cache.cache_controller
        target, draft = controller.mem_pool_host, controller.mem_pool_host_draft
        assert draft.size >= target.size
        assert draft.device_pool is run.worker.draft_model_runner.token_to_kv_pool
        sizes = [f"{pool.kv_buffer.nbytes / 1e9:.3g} GB" for pool in (target, draft)]
        said = capfd.readouterr().err
        assert f"takes {sizes[0]} of host memory" in said
        assert f"{sizes[1]} more for the draft's" in said
        asked = AttachHiCacheStorageReqInput(hicache_storage_backend="file")
        done = run.scheduler.attach_hicache_storage_wrapped(asked)
        assert not done.success
        assert "storage" in done.message


@pytest.mark.full
@pytest.mark.parametrize("ahead", ["on", "off"])
def test_many_requests(small: Path, monkeypatch: pytest.MonkeyPatch, ahead: str) -> None:
    """Three at a time, of eight prefixes that do not fit the device's KV together."""
    monkeypatch.setenv(DRAFT_AHEAD, ahead)
    prefixes = [prompt(980 + i, 80) for i in range(8)]
    asked = {str(i): Asked(prefixes[i % 8] + prompt(990 + i, 3), N) for i in range(16)}
    flags: dict[str, Any] = {
        "max_running_requests": 3,
        "cuda_graph_bs": [4],
        "max_total_tokens": 640,
    }
    with with_host_cache(small, "fa3", **flags) as run:
        drafts = recorded(run)
        reqs: dict[str, Any] = {}
        for name, one in asked.items():
            reqs[name] = run.add(one.ids, **one.options)
            for _ in range(3):
                run.step()
        run.run(*reqs.values())
    assert any(req.cached_tokens_host for req in reqs.values())
    assert_exact(reqs, answer(small, asked))
    assert_drafts(small, reqs, drafts)
