"""Quantised drafts on a GPU have the acceptance of the same drafts dequantised.

The bundled draft is quantised here, round to nearest, in the layouts that fp8, AWQ and GPTQ
checkpoints have.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sglang_dflash.tiny import DRAFT, TARGET
from test.checkpoints import write_draft
from test.gpu.conftest import DRY_RUN, ON_GPU, prompts

pytestmark = ON_GPU

GROUP = 64  # divides every input size of the bundled draft
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column, of eight, that each nibble holds


def pack(values: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Pack eight 4-bit values of a dimension into one int32."""
    eights = values.to(torch.int64).unflatten(dim, (-1, 8)).movedim(dim + 1, -1)
    word = sum(eights[..., column] << (4 * i) for i, column in enumerate(order))
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """4-bit values around 8 and their scales. weight: [out, in] -> [in, out], [in / GROUP, out]."""
    groups = weight.T.unflatten(0, (-1, GROUP))  # [in / GROUP, GROUP, out]
    scales = (groups.abs().amax(1) / 7).half().float().clamp_min(1e-6)
    values = (groups / scales[:, None]).round().clamp(-8, 7) + 8
    return values.flatten(0, 1), scales


def fp8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.abs().max() / torch.finfo(torch.float8_e4m3fn).max
    stored = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scale.view(1)}, stored.float() * scale


def four_bits(weight: Tensor, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    values, scales = rounded(weight)
    restored = (values.unflatten(0, (-1, GROUP)) - 8) * scales[:, None]
    return tensors | {"scales": scales.half()}, restored.flatten(0, 1).T.contiguous()


def awq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    values, scales = rounded(weight)
    zeros = torch.full_like(scales, 8)
    packed = {"qweight": pack(values, 1, AWQ_ORDER), "qzeros": pack(zeros, 1, AWQ_ORDER)}
    return four_bits(weight, packed)


def gptq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    values, scales = rounded(weight)
    zeros = torch.full_like(scales, 7)  # GPTQ stores one less
    groups = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
    return four_bits(
        weight, {"qweight": pack(values, 0), "qzeros": pack(zeros, 1), "g_idx": groups}
    )


METHODS: dict[str, tuple[Callable[[Tensor], tuple[dict[str, Tensor], Tensor]], dict[str, Any]]] = {
    "fp8": (fp8, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "awq": (
        awq,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "version": "gemm",
        },
    ),
    "gptq": (
        gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    ),
}


def write_pair(folder: Path, method: str) -> tuple[Path, Path]:
    """The quantised draft, and the same one dequantised."""
    store, described = METHODS[method]
    config = json.loads((DRAFT / "config.json").read_text())
    quantised, plain = {}, {}
    for name, tensor in load_file(DRAFT / "model.safetensors").items():
        quantised[name] = plain[name] = tensor.half()
        if "_proj.weight" in name:
            tensors, restored = store(tensor.float())
            del quantised[name]
            prefix = name.removesuffix("weight")
            quantised |= {prefix + part: value.contiguous() for part, value in tensors.items()}
            plain[name] = restored.half()
    config["torch_dtype"] = "float16"
    return (
        write_draft(folder / "quantised", config | {"quantization_config": described}, quantised),
        write_draft(folder / "plain", config, plain),
    )


def accepted(draft: Path) -> float:
    """Accepted drafts per step."""
    import sglang

    engine = sglang.Engine(
        model_path=str(TARGET),
        speculative_algorithm="DFLASH",
        speculative_draft_model_path=str(draft),
        dtype="float32" if DRY_RUN else "float16",
        attention_backend=None if DRY_RUN else "triton",
        max_total_tokens=4096,
        mem_fraction_static=0.3,
        cuda_graph_bs=[6],
        disable_piecewise_cuda_graph=True,  # half a minute to capture
    )
    try:
        sampling = {"temperature": 0, "max_new_tokens": 128}
        answers = engine.generate(input_ids=prompts(6), sampling_params=sampling)
    finally:
        engine.shutdown()
    steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    drafts = sum(sum(answer["meta_info"]["spec_accepted_per_position"]) for answer in answers)
    rate: float = drafts / steps
    return rate


@pytest.mark.parametrize("method", METHODS)
def test_quantised_drafts(tmp_path: Path, method: str) -> None:
    quantised, plain = write_pair(tmp_path, method)
    expected = accepted(plain)
    assert expected > 0.5
    if not DRY_RUN:  # a CPU has no kernels for these
        assert accepted(quantised) == pytest.approx(expected, rel=0.1)
