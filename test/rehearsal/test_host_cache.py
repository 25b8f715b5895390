"""SGLang's hierarchical cache: a prefix that comes back from host memory has the draft's KV."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.managers import cache_controller
from sglang.srt.managers.io_struct import AttachHiCacheStorageReqInput
from sglang.srt.mem_cache import memory_pool_host

from sglang_dflash.settings.options import DRAFT_AHEAD
from test.adapters import write_adapter
from test.checkpoints import prompt
from test.inprocess import InProcess
from test.rehearsal.device import attention
from test.rehearsal.mutation import mutate
from test.rehearsal.serving import Asked, add, answer, assert_drafts, assert_exact, engine, recorded
from test.worker.conftest import facts

pytestmark = pytest.mark.ci

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


def trace_on_device(small: Path, **flags: Any) -> Any:
    """The trace where the prefix stays on the device."""
    with engine(small, "fa3", max_running_requests=1, cuda_graph_bs=[1], **flags) as run:
        reqs, drafts = serve(run, [])
    assert reqs["again"].cached_tokens >= 96
    return trace(reqs, drafts)


@pytest.fixture(scope="module")
def kept(small: Path) -> Any:
    return trace_on_device(small)


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


@pytest.mark.full
def test_a_window_of_the_draft(small: Path, kept: Any) -> None:
    window = {"speculative_draft_window_size": 32}
    reqs, drafts = from_host(small, "fa3", **window)
    assert_exact(reqs, answer(small, ASKED))
    assert trace(reqs, drafts) == trace_on_device(small, page_size=16, **window)
    assert trace(reqs, drafts) != kept


@pytest.mark.full
def test_kv_in_fp8(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft's KV beside it is in fp32, on the host as on the device."""
    monkeypatch.setattr(attention, "OUT_OF_FP8", torch.float32)
    fp8 = {"kv_cache_dtype": "fp8_e4m3"}
    reqs, drafts = from_host(small, "fa3", **fp8)
    assert_exact(reqs, answer(small, ASKED, **fp8))
    assert trace(reqs, drafts) == trace_on_device(small, **fp8)


@pytest.mark.full
def test_adapters(small: Path, tmp_path: Path) -> None:
    """A prefix on the host belongs to one adapter."""
    write_adapter(tmp_path, small / "target", rank=16)
    flags: dict[str, Any] = {"lora_paths": [f"wide={tmp_path}"], "lora_backend": "triton"}
    first, again = (ASKED[name] for name in ("first", "again"))
    asks = [("wide", first), ("wide", again), (None, again)]
    told = []
    with engine(small, "fa3", draft=False, **flags, disable_radix_cache=True) as run:
        for name, one in asks:
            told.append(add(run, name, one))
            run.run(told[-1])
    with with_host_cache(small, "fa3", **flags) as run:
        reqs = [add(run, *asks[0])]
        run.run(reqs[0])
        for ids in [PREFIX, *OTHERS]:
            run.generate(ids, **N)
        for name, one in asks[1:]:
            reqs.append(add(run, name, one))
            run.run(reqs[-1])
    assert [facts(req)["ids"] for req in reqs] == [facts(req)["ids"] for req in told]
    assert facts(told[1])["ids"] != facts(told[2])["ids"]
    assert reqs[1].cached_tokens_host >= 80


def test_drafts_from_the_targets_pool(
    small: Path, kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are still right, but the host's copy of the draft's KV is missing."""
    pool = "runner.token_to_kv_pool,"
    mutate(monkeypatch, "targets.host_cache:draft_kv_pool", pool, f"draft_worker.model_{pool}")
    reqs, drafts = from_host(small, "fa3")
    assert_exact(reqs, answer(small, ASKED))
    assert trace(reqs, drafts) != kept


def test_a_prefill_that_does_not_wait(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = "batch.hicache_consumer_index"
    mutate(monkeypatch, "step.prefill:Prefill.run", index, "-1")
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
