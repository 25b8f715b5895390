"""The Triton kernels of a DFLASH server compile for sm_90, with the arguments of real launches."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from triton.compiler.errors import CompilationError

from sglang_dflash.adaptive.step_times import StepTimer
from sglang_dflash.kernels import store_kv
from sglang_dflash.settings.options import VERIFY_WIDTH
from test.checkpoints import prompt, write_draft, write_target
from test.rehearsal.device import kernels
from test.rehearsal.serving import HEADS, N, engine, once_each, small_draft

pytestmark = pytest.mark.ci

STEP = {"max_new_tokens": 3, "ignore_eos": True}
KINDS: list[dict[str, Any]] = [
    {"regex": "(t01[0-9]|t02[0-9]){8}"},
    {"temperature": 1.0, "top_k": 5, "sampling_seed": 3},
    {"frequency_penalty": 0.5},
]
ATTENTION = "srt.layers.attention.triton_ops.extend_attention:_fwd_kernel"
ACCEPT = "sglang_dflash.kernels.accept:_accept"
BLOCK = "sglang_dflash.kernels.next_block:_next_block"
ALLOCATION = "srt.mem_cache.triton_ops.allocator:alloc_extend_kernel"
MASK = "srt.constrained.triton_ops.bitmask_ops:apply_token_bitmask_inplace_kernel"
HASH = "srt.layers.utils.hash:murmur_hash32_kernel"
CONTEXT_KV = "sglang_dflash.kernels.store_kv:_store_kv"
SELDOM = ("rows:_survival", "rows:_choose_rows", "rows:_learn_survival", "draw:_draw")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """The compiled kernels, with the types of their pointers."""
    found: dict[str, set[str]] = {}
    monkeypatch.setattr(kernels, "COMPILED", found)
    return found


DIMS = [128, 256, 96, 64]


@pytest.mark.parametrize(("dim", "dtype"), once_each(DIMS, ["bfloat16", "float32", "float16"]))
def test_dtypes_and_head_sizes(
    tmp_path: Path, compiled: dict[str, set[str]], dtype: str, dim: int
) -> None:
    """Attention of target and draft, and context KV, through the functions that launch them."""
    heads = HEADS | {"head_dim": dim}
    write_target(tmp_path / "target", num_hidden_layers=2, **heads)
    write_draft(tmp_path / "draft", *small_draft(head_dim=dim))
    with engine(tmp_path, "triton", dtype=dtype, disable_cuda_graph=True) as run:
        run.generate(prompt(1, 6), **N | {"max_new_tokens": 2})
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[dtype]
    for name in (ATTENTION, CONTEXT_KV):
        assert any(f"*{short}" in kinds for kinds in compiled[name]), name


@pytest.mark.parametrize(
    ("backend", "seeded", "kv"),
    [
        ("triton", True, "auto"),
        ("triton", False, "auto"),
        ("flashinfer", False, "auto"),
        ("fa3", False, "auto"),
        pytest.param("flashinfer", False, "fp8_e4m3", marks=pytest.mark.full),
    ],
)
def test_all_that_serving_launches(
    small: Path, compiled: dict[str, set[str]], backend: str, seeded: bool, kv: str
) -> None:
    """The other Triton kernels, in fp32: pages, a grammar's mask, a seeded draw."""
    flags: dict[str, Any] = {
        "page_size": 16,
        "cuda_graph_bs": [4],
        "enable_deterministic_inference": seeded,
        "kv_cache_dtype": kv,
    }
    with engine(small, backend, **flags) as run:
        reqs = [run.add(prompt(i, 20), **STEP | kind) for i, kind in enumerate(KINDS)]
        run.run(*reqs)
    expected = {CONTEXT_KV, ACCEPT, BLOCK, ALLOCATION, MASK} | ({HASH} if seeded else set())
    assert expected <= compiled.keys()


@pytest.mark.parametrize("backend", ["fa3", pytest.param("triton", marks=pytest.mark.full)])
def test_serving_compiles_nothing(
    small: Path, compiled: dict[str, set[str]], monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """After startup and a greedy request, such as SGLang sends itself: all others would wait.

    Nor does a forward that is timed at startup, behind one for each of 1, 2 and 4 requests.
    """
    monkeypatch.setenv(VERIFY_WIDTH, "auto")
    seconds, made_by_each = StepTimer._seconds, []

    def watched(timer: StepTimer, requests: int, rows: int) -> float:
        before = sum(map(len, compiled.values()))
        taken = seconds(timer, requests, rows)
        made_by_each.append(sum(map(len, compiled.values())) - before)
        return taken

    monkeypatch.setattr(StepTimer, "_seconds", watched)
    with engine(small, backend, cuda_graph_bs=[1, 2, 4]) as run:
        assert all(made_by_each[1:3])
        assert not any(made_by_each[3:])
        run.generate(prompt(1, 9), **STEP)
        before = {name: set(made) for name, made in compiled.items()}
        assert {f"sglang_dflash.kernels.{name}" for name in SELDOM} <= before.keys()
        kinds: list[dict[str, Any]] = [{}, {"temperature": 0.9}, {"temperature": 0.9, "top_k": 5}]
        for kind in kinds:
            for count in (4, 3, 1):
                reqs = [run.add(prompt(i, 9 + i), **STEP | kind) for i in range(count)]
                run.run(*reqs)
    ours = {name: made for name, made in compiled.items() if name.startswith("sglang_dflash.")}
    assert ours == {name: made for name, made in before.items() if name in ours}


def test_an_annotated_argument_is_refused(
    small: Path, compiled: dict[str, set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutation: Triton takes an annotation other than tl.constexpr for a global."""
    kernel = store_kv._store_kv
    source = kernel.src
    assert source.count("    kv,  #") == 1
    monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    kernel._unsafe_update_src(source.replace("    kv,  #", "    kv: Tensor,  #"))
    try:
        with pytest.raises(CompilationError), engine(small, "fa3", cuda_graph_bs=[4]) as run:
            run.generate(prompt(1, 5), **N)
    finally:
        kernel._unsafe_update_src(source)
