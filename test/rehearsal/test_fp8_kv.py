"""Targets that keep KV in FP8, on the attention backends of a GPU that can verify for them.

Both servers, with and without speculation, use the same backend: fa3 also rounds queries to FP8.
SGLang's flashinfer reads a prompt's own K and V as they are computed and those of its cached prefix
from the pool, so it gets no prefix cache here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp8Config

from sglang_dflash.errors import Refusal
from test.checkpoints import LAYERS, prompt, write_draft
from test.rehearsal.device import attention
from test.rehearsal.mutation import mutate
from test.rehearsal.serving import (
    HEADS,
    Asked,
    N,
    all_kinds,
    answer,
    engine,
    served,
    small_draft,
)
from test.targets import write_modelopt

pytestmark = pytest.mark.ci

PAIRS = [
    ("fa3", "fp8_e4m3", 1),
    ("flashinfer", "fp8_e5m2", 16),
    pytest.param("fa3", "fp8_e4m3", 16, marks=pytest.mark.full),
    pytest.param("flashinfer", "fp8_e4m3", 1, marks=pytest.mark.full),
]


@pytest.fixture(autouse=True)
def outputs_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention 3 returns bf16, which a model in fp32 could not read."""
    monkeypatch.setattr(attention, "OUT_OF_FP8", torch.float32)


def flags_of(backend: str, kv: str) -> dict[str, Any]:
    uncached = {"disable_radix_cache": True} if backend == "flashinfer" else {}
    return {"kv_cache_dtype": kv, "attention_backend": backend} | uncached


@pytest.mark.parametrize(("backend", "kv", "page"), PAIRS)
def test_all_kinds_of_requests(small: Path, backend: str, kv: str, page: int) -> None:
    """In graphs, with the draft's KV in fp32."""
    flags = flags_of(backend, kv)
    asked = answer(small, all_kinds(), **flags)
    in_fp32 = answer(small, {"greedy": all_kinds()["greedy"]})
    assert asked["greedy"].answer["ids"] != in_fp32["greedy"].answer["ids"]
    reqs, _ = served(small, asked, backend, **flags, page_size=page)
    assert (reqs["radix"].cached_tokens >= 32) == (backend == "fa3")
    assert reqs["greedy"].spec_verify_ct < 12


def test_a_draft_with_kv_in_fp8_is_seen(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutation: the draft takes over the flag of the target."""
    mutate(
        monkeypatch,
        "engine.v0_5_13.draft_worker:draft_server_args",
        'args.kv_cache_dtype = "auto"',
        "pass",
    )
    flags = flags_of("fa3", "fp8_e4m3")
    asked = answer(small, {"one": Asked(prompt(1, 5), N)}, **flags)
    with pytest.raises(AssertionError):
        served(small, asked, "fa3", **flags)


@pytest.fixture
def scaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a ModelOpt target, which has scales of K and V, and a draft.

    No weight is quantised, for SGLang's quantised products would not take fp32.
    """
    dtypes = [torch.float32, torch.bfloat16]
    monkeypatch.setattr(ModelOptFp8Config, "get_supported_act_dtypes", lambda _: dtypes)
    write_modelopt(tmp_path / "target", 0.07, **HEADS)
    write_draft(tmp_path / "draft", *small_draft(num_target_layers=LAYERS))
    return tmp_path


@pytest.mark.full
@pytest.mark.parametrize("backend", ["fa3", "flashinfer"])
def test_scales_of_a_checkpoint(
    scaled: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """SGLang sets FP8 when it loads the target. With paged prefills, flashinfer uses the scales."""
    monkeypatch.setenv("SGLANG_FLASHINFER_USE_PAGED", "1")
    asked = {str(i): Asked(prompt(970 + i, 9 + i), N) for i in range(3)}
    asked = answer(scaled, asked, attention_backend=backend)
    served(scaled, asked, backend)


def check_refused(folder: Path, words: str, backend: str, **flags: Any) -> None:
    given: dict[str, Any] = {"dtype": "bfloat16", "disable_cuda_graph": True} | flags
    with pytest.raises(Refusal, match=words), engine(folder, backend, **given):
        pass


PREFILLS = "leaves them out when it prefills"
MULTIPLIED = "also multiply KV in bfloat16"


def test_scales_that_a_backend_gets_wrong(scaled: Path) -> None:
    check_refused(scaled, PREFILLS, "flashinfer")
    check_refused(scaled, MULTIPLIED, "flashinfer", kv_cache_dtype="bf16")
    check_refused(scaled, MULTIPLIED, "triton", kv_cache_dtype="bfloat16")


def test_scales_that_are_not_seen(scaled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutation: the loaded target is not asked for them."""
    mutate(
        monkeypatch, "targets.kv_dtype:_has_scales", "isinstance(layer, RadixAttention)", "False"
    )
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check_refused(scaled, PREFILLS, "flashinfer")
