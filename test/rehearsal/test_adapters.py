"""LoRA adapters: SGLang's backends in graphs and without them, with several adapters in a batch."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.adaptive.verify_graphs import WidthGraphs
from sglang_dflash.adaptive.verify_width import AdaptiveWidth
from sglang_dflash.settings.options import VERIFY_WIDTH
from sglang_dflash.targets import lora as adapters
from test.adapters import write_adapter
from test.checkpoints import prompt, write_draft
from test.cuts import verify_any_rows
from test.rehearsal.serving import Asked, N, add, engine, forced, small_draft, write_hybrid_pair
from test.worker.conftest import facts

pytestmark = pytest.mark.ci

FEW = N | {"max_new_tokens": 10}
ASKED = [("wide", 20), (None, 20), ("narrow", 3), ("head", 33)]


@pytest.fixture(scope="module")
def flags(small: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, target = tmp_path_factory.mktemp("adapters"), small / "target"
    write_adapter(folder / "wide", target, rank=16, vocabulary=("embed_tokens",))
    write_adapter(folder / "narrow", target, rank=4, seed=1)
    write_adapter(folder / "head", target, rank=8, seed=2, vocabulary=("lm_head",))
    paths = [f"{name}={folder / name}" for name in ("wide", "narrow", "head")]
    return {"lora_paths": paths, "max_loras_per_batch": 4}


Asks = list[tuple[str | None, Asked]]  # adapter and request


def answered(small: Path, flags: dict[str, Any], asks: Asks) -> Asks:
    """Fill in the answer to each alone: without speculation, graphs and other adapters."""
    plain = {"disable_cuda_graph": True, "disable_radix_cache": True, "lora_backend": "triton"}
    with engine(small, "fa3", draft=False, **flags | plain) as run:
        for name, one in asks:
            req = add(run, name, one)
            run.run(req)
            one.answer = facts(req)
    return asks


@pytest.fixture(scope="module")
def asked(small: Path, flags: dict[str, Any]) -> Asks:
    asks = [(name, Asked(prompt(970 + length, length), FEW)) for name, length in ASKED]
    found = answered(small, flags, asks)
    assert found[0][1].answer["ids"] != found[1][1].answer["ids"]
    return found


def right(small: Path, asked: Asks, width: str = "full", anew: bool = False, **flags: Any) -> bool:
    """Serve the requests, which join one after another. Whether all answers are right.

    With several verify widths, all of them are used in turn. anew: graphs are captured a second
    time, as after new weights.
    """
    reqs = []
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv(VERIFY_WIDTH, width)
        run = stack.enter_context(engine(small, "fa3", **flags))
        if isinstance(run.worker.verify_width, AdaptiveWidth):
            verify_any_rows(run.worker)
        if anew:
            run.worker.before_new_weights()
            run.worker.model_runner.init_device_graphs()
            run.worker.graphs.capture()
        drafts = forced(run)
        for name, one in asked:
            reqs.append(add(run, name, one))
            drafts.truth[reqs[-1].rid] = one.answer["ids"]
            run.step()
        run.run(*reqs)
    return all(
        facts(req)["ids"] == one.answer["ids"] for req, (_, one) in zip(reqs, asked, strict=True)
    )


KINDS: list[dict[str, Any]] = [
    {"lora_backend": "csgmv"},
    {"lora_backend": "triton", "cuda_graph_bs": [2]},  # larger batches are eager
    {"lora_backend": "csgmv", "width": "auto"},
]
FURTHER: list[dict[str, Any]] = [
    {"lora_backend": "triton", "width": "auto"},
    {"lora_backend": "triton", "width": "5"},
    {"lora_backend": "triton", "width": "auto", "disable_cuda_graph": True},
    {"lora_backend": "csgmv", "width": "auto", "cuda_graph_bs": [2]},
    {"lora_backend": "csgmv", "width": "auto", "anew": True},
    {"lora_backend": "csgmv", "max_lora_chunk_size": 64, "width": "3", "cuda_graph_bs": [4]},
    {"lora_backend": "csgmv", "max_lora_chunk_size": 64, "disable_cuda_graph": True},
    {"lora_backend": "triton", "disable_cuda_graph": True},
]


@pytest.mark.parametrize(
    "kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.full) for kind in FURTHER)], ids=str
)
def test_equals_target(
    small: Path, flags: dict[str, Any], asked: Asks, kind: dict[str, Any]
) -> None:
    assert right(small, asked, **flags | kind)


@pytest.mark.full
@pytest.mark.parametrize("chunk", [16, pytest.param(10_000, id="mutation")])
def test_blocks_of_several_segments(
    small: Path,
    tmp_path: Path,
    flags: dict[str, Any],
    asked: Asks,
    monkeypatch: pytest.MonkeyPatch,
    chunk: int,
) -> None:
    """A block of 20 tokens takes two segments, which the mutation does not compute."""
    monkeypatch.setattr(adapters, "CHUNK", chunk)
    (tmp_path / "target").symlink_to(small / "target")
    write_draft(tmp_path / "draft", *small_draft(block_size=20))
    assert right(tmp_path, asked, **flags, lora_backend="csgmv") == (chunk == 16)


def test_segments_of_a_capture_are_too_few(
    small: Path,
    flags: dict[str, Any],
    asked: Asks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mutation: graphs compute the segments that SGLang captures."""
    monkeypatch.setattr(adapters, "run_all_segments", lambda *_, **__: None)
    assert not right(small, asked, **flags, lora_backend="csgmv")


def test_each_width_prepares_its_own_adapters(
    small: Path, flags: dict[str, Any], asked: Asks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutation: adapters are prepared for the width that was captured last, whichever runs."""

    def shared(graphs: WidthGraphs, width: int) -> None:
        graphs._runner.attn_backend, graphs._runner.graph_runner, _ = graphs._parts[width]

    monkeypatch.setattr(WidthGraphs, "_use", shared)
    assert not right(small, asked, "auto", **flags, lora_backend="triton")


@pytest.mark.full
def test_unused_segments_are_empty(
    small: Path, flags: dict[str, Any], asked: Asks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A smaller batch has fewer segments. Those of the batch before it do not stay."""
    run_all_segments, seen = adapters.run_all_segments, []

    def checked(result: None, backend: Any, **given: Any) -> None:
        used = backend.batch_info.num_segments
        run_all_segments(result, backend, **given)
        if backend.batch_info.use_cuda_graph:
            bounds = backend.batch_info.seg_indptr.tolist()
            seen.append(set(bounds[used:]) == {len(given["forward_batch"].input_ids)})

    monkeypatch.setattr(adapters, "run_all_segments", checked)
    assert right(small, asked, **flags, lora_backend="csgmv")
    assert seen
    assert all(seen)


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", [*KINDS, FURTHER[0], {"max_mamba_cache_size": 16, "lora_backend": "csgmv"}]
)
def test_hybrid_target(tmp_path: Path, kind: dict[str, Any]) -> None:
    """Adapters on full and on linear attention, whose states are those of the accepted tokens."""
    write_hybrid_pair(tmp_path)
    for seed, (name, rank) in enumerate([("wide", 16), ("narrow", 4)]):
        write_adapter(tmp_path / name, tmp_path / "target", rank, seed=seed)
    paths = [f"{name}={tmp_path / name}" for name in ("wide", "narrow")]
    flags: dict[str, Any] = {"lora_paths": paths, "max_loras_per_batch": 3}
    asks = [("wide", 20), (None, 20), ("narrow", 1), ("wide", 9)]
    few = N | {"max_new_tokens": 8}
    asked = [(name, Asked(prompt(970 + length, length), few)) for name, length in asks]
    answered(tmp_path, flags, asked)
    assert asked[0][1].answer["ids"] != asked[1][1].answer["ids"]
    usual: dict[str, Any] = {"cuda_graph_bs": [4]}
    if "max_mamba_cache_size" not in kind:
        usual["disable_radix_cache"] = True
    assert right(tmp_path, asked, **flags | usual | kind)
