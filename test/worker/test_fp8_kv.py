"""Targets that keep KV in FP8: their tokens, their scales, and the draft's KV.

One-token decoding reads K and V of FP8, also those of the token itself. So does a verify.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp8Config
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_dflash.cpu.limits import KV_BYTES, _bytes_bound
from sglang_dflash.errors import Refusal
from sglang_dflash.settings import platforms
from test.arguments import arguments
from test.checkpoints import LAYERS, prompt
from test.inprocess import InProcess
from test.precision import ROUNDED_KV, SCALED_KV_LARGEST, SCALED_KV_LOGPROB
from test.targets import write_modelopt
from test.worker.conftest import each_alone, facts, join

SHARED = prompt(50, 40)
LONG = {"max_new_tokens": 40, "ignore_eos": True, "return_logprob": True}
DRAWN = LONG | {"temperature": 0.9, "top_k": 8}
ASKED: list[tuple[list[int], dict[str, Any]]] = [
    (SHARED, LONG),
    (prompt(51, 7), DRAWN | {"sampling_seed": 5}),
    (SHARED + prompt(52, 9), LONG),
    (SHARED + prompt(53, 3), DRAWN | {"sampling_seed": 6, "top_p": 0.9}),
]
KINDS = ["fp8_e4m3", "fp8_e5m2", "scaled"]
FLAGS: list[dict[str, Any]] = [
    {},
    {"page_size": 16, "chunked_prefill_size": 32},
    {"page_size": 16, "disable_radix_cache": True},
]
TURNS = [(kind, FLAGS[i]) for i, kind in enumerate(KINDS)]  # of `make test`


def kv_flags(kind: str, folder: Path, layers: int = LAYERS) -> dict[str, Any]:
    """Server flags: a format, or FP8 with a scale for each layer."""
    if kind != "scaled":
        return {"kv_cache_dtype": kind}
    factors = {"0": {str(i): 0.05 + 0.02 * i for i in range(layers)}}
    schema = {"dtype": "float8_e4m3fn", "scaling_factor": factors}
    file = folder / "scales.json"
    file.write_text(json.dumps({"model_type": "qwen3", "kv_cache": schema}))
    return {"kv_cache_dtype": "fp8_e4m3", "quantization_param_path": str(file)}


ANSWERS: dict[str, list[dict[str, Any]]] = {}  # of this process, by the flags


def alone(target: str, flags: dict[str, Any]) -> list[dict[str, Any]]:
    """The answers without speculation, to one request at a time."""
    key = repr((target, {**flags, "quantization_param_path": "quantization_param_path" in flags}))
    if key not in ANSWERS:
        ANSWERS[key] = each_alone(target, ASKED, **flags)
    return ANSWERS[key]


def check_tokens(
    target: str, draft: str, expected: list[dict[str, Any]], **flags: Any
) -> dict[str, Any]:
    """Serve with drafts of which any number is right. Returns what the engine says of its KV."""
    with InProcess(target, draft, **flags) as engine:
        reqs = join(engine, ASKED, expected, steps=2)
        runners = engine.worker.model_runner, engine.worker.draft_model_runner
        dtypes = tuple(runner.token_to_kv_pool.dtype for runner in runners)
        layer = next(m for m in runners[0].model.modules() if isinstance(m, RadixAttention))
        said = {"dtypes": dtypes, "flag": engine.server_args.kv_cache_dtype}
        said |= {"scales": (layer.k_scale, layer.v_scale)}
        pool = runners[0].token_to_kv_pool
        said["largest"] = [pool.get_kv_buffer(0)[i].float().abs().max().item() for i in range(2)]
    for req, answer in zip(reqs, expected, strict=True):
        got = facts(req)
        assert got["logprobs"] == pytest.approx(answer["logprobs"], abs=ROUNDED_KV.logprob)
        assert {**got, "logprobs": None} == {**answer, "logprobs": None}
    assert (reqs[2].cached_tokens > 0) == (not flags.get("disable_radix_cache", False))
    assert sum(req.spec_num_correct_drafts for req in reqs) > 20
    return said


SEEDED: dict[str, Any] = {"enable_deterministic_inference": True}


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        pytest.param(*turn, marks=() if turn in TURNS else pytest.mark.full, id=str(turn))
        for turn in product(KINDS, FLAGS)
    ],
)
def test_tokens(target: str, draft: str, tmp_path: Path, kind: str, flags: dict[str, Any]) -> None:
    """Equal to the same server without speculation, and not to one with KV in fp32."""
    quantised = SEEDED | kv_flags(kind, tmp_path)
    expected = alone(target, quantised)
    plain = alone(target, SEEDED)
    assert all(a["ids"] != b["ids"] for a, b in zip(expected, plain, strict=True))
    said = check_tokens(target, draft, expected, **quantised, **flags)
    stored = torch.float8_e5m2 if kind == "fp8_e5m2" else torch.float8_e4m3fn
    assert said["dtypes"] == (stored, torch.float32)


def test_scales_of_a_checkpoint(
    draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ModelOpt's checkpoint asks for FP8 and holds scales. SGLang sets the flag when it loads it.

    A power of two as the scale changes what is stored, and hardly how it is rounded. No weight is
    quantised here, for SGLang's quantised products would not take fp32.
    """
    unit, scaled = (write_modelopt(tmp_path / str(scale), scale) for scale in (1.0, 0.25))
    with pytest.raises(Refusal, match=r"quantised \(modelopt_fp8\), which is not served on a CPU"):
        arguments(scaled, draft)
    able = replace(platforms.PLATFORMS["cpu"], quantised_weights=True)
    monkeypatch.setitem(platforms.PLATFORMS, "cpu", able)
    monkeypatch.setattr(ModelOptFp8Config, "get_supported_act_dtypes", lambda _: [torch.float32])
    expected = [alone(target, SEEDED) for target in (unit, scaled)]
    pairs = zip((unit, scaled), expected, strict=True)
    said = [check_tokens(target, draft, answers, **SEEDED) for target, answers in pairs]
    for one in said:
        assert one["dtypes"] == (torch.float8_e4m3fn, torch.float32)
        assert one["flag"] == "fp8_e4m3"
    first = [[answer["logprobs"][0] for answer in answers] for answers in expected]
    assert first[1] == pytest.approx(first[0], abs=SCALED_KV_LOGPROB)
    assert [[float(scale) for scale in one["scales"]] for one in said] == [[1, 1], [0.25, 0.25]]
    stored = [4 * largest for largest in said[0]["largest"]]  # of other tokens
    assert said[1]["largest"] == pytest.approx(stored, rel=SCALED_KV_LARGEST)


def test_bf16_is_served_by_flag(target: str, draft: str) -> None:
    """The target's KV is in bf16. A float16 target would need other kernels on a GPU."""
    with InProcess(target, draft, kv_cache_dtype="bf16") as engine:
        assert engine.worker.model_runner.token_to_kv_pool.dtype == torch.bfloat16
        assert engine.worker.draft_model_runner.token_to_kv_pool.dtype == torch.float32
        assert len(engine.generate(*ASKED[0][:1], max_new_tokens=9, ignore_eos=True)) == 9
    with pytest.raises(Refusal, match="float16"):
        arguments(target, draft, kv_cache_dtype="bfloat16", dtype="float16")


@pytest.mark.parametrize(("kv", "itemsize"), [("auto", 4), ("bfloat16", 2), ("fp8_e4m3", 1)])
def test_the_default_room_counts_both_pools(
    target: str, draft: str, kv: str, itemsize: int
) -> None:
    """Two KV heads of 32: the target has 4 layers of them, the draft 2 in the model's dtype."""
    args = arguments(target, draft, kv_cache_dtype=kv, dtype="float32")
    per_token = 2 * 2 * 32 * (LAYERS * itemsize + 2 * 4)
    assert _bytes_bound(args) == KV_BYTES // per_token
