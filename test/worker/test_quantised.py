"""The context projections of a quantised draft equal those of its dequantised weights.

Only unquantised projections of several layers are stacked. The layout of a quantised one depends on
its method, here int8 rows with a scale for each of q, k and v. So it must run whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch import Tensor, nn
from torch.nn import functional as F

from sglang_dflash.kernels import Kernels
from sglang_dflash.model.context_kv import ContextKV
from test.checkpoints import HIDDEN
from test.inprocess import InProcess


class ScaledRows(LinearMethodBase):
    """Weights as in an fp8 checkpoint: stored values, and one scale per projection."""

    def create_weights(self, layer: nn.Module, *sizes: object, **options: object) -> None:
        raise AssertionError("made by `quantise`")

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, dequantised(layer), bias)


def quantise(layer: Any) -> None:
    """Store a QKV projection as int8. q, k and v get their own scales."""
    parts = layer.weight.data.split(layer.output_partition_sizes)
    scales = [
        part.abs().max() * factor / 127 for part, factor in zip(parts, (1, 2, 3), strict=True)
    ]
    stored = [
        (part / scale).round().to(torch.int8) for part, scale in zip(parts, scales, strict=True)
    ]
    layer.scales = torch.cat(
        [scale.expand(len(part)) for part, scale in zip(parts, scales, strict=True)]
    )
    layer.weight = nn.Parameter(torch.cat(stored), requires_grad=False)
    layer.quant_method = ScaledRows()


def dequantised(layer: Any) -> Tensor:
    weight: Tensor = layer.weight.float() * layer.scales[:, None]
    return weight


@pytest.fixture
def engine(target: str, draft: str) -> Iterator[InProcess]:
    with InProcess(target, draft) as engine:
        yield engine


def context_kv(engine: InProcess, features: Tensor, slots: Tensor) -> tuple[ContextKV, Tensor]:
    """The writer, and the K/V that it writes for these features, [2, layers, n, heads, D]."""
    runner = engine.worker.draft_model_runner
    writer = ContextKV(runner.model, runner.token_to_kv_pool, Kernels.on("cpu"), queues_work=False)
    writer.write(features, torch.arange(len(slots)), slots)
    pool = runner.token_to_kv_pool
    written = [[b[slots].clone() for b in buffers] for buffers in (pool.k_buffer, pool.v_buffer)]
    return writer, torch.stack([torch.stack(layers) for layers in written])


@torch.inference_mode()
def test_context_kv_of_quantised_projections(engine: InProcess) -> None:
    features = torch.randn(11, 2 * HIDDEN, generator=torch.Generator().manual_seed(1))
    slots = torch.arange(5, 16)
    stacked, before = context_kv(engine, features, slots)
    projections = [
        layer.self_attn.qkv_proj for layer in engine.worker.draft_model_runner.model.layers
    ]
    for projection in projections:
        quantise(projection)
    whole, quantised = context_kv(engine, features, slots)
    assert whole._project == whole._project_each
    for projection in projections:
        projection.weight = nn.Parameter(dequantised(projection), requires_grad=False)
        projection.quant_method = UnquantizedLinearMethod()
    restacked, expected = context_kv(engine, features, slots)
    assert stacked._project != stacked._project_each
    assert restacked._project != restacked._project_each
    torch.testing.assert_close(quantised, expected, atol=1e-5, rtol=1e-5)
    assert (quantised - before).abs().max() > 1e-3  # int8 makes a difference
