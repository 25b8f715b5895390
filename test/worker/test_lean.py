"""Lean norm and RoPE give the bits of SGLang's own methods, in fewer operations."""

from __future__ import annotations

from functools import partial
from inspect import signature
from typing import Any

import pytest
import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from torch import nn

from sglang_dflash.cpu.lean import make_lean
from test.inprocess import InProcess


@pytest.fixture(scope="module")
def modules(target: str, draft: str) -> list[nn.Module]:
    """The modules of the small target and its draft, as a server has them."""
    with InProcess(target, draft) as engine:
        runners = engine.worker.model_runner, engine.worker.draft_model_runner
        return [module for runner in runners for module in runner.model.modules()]


def lean(modules: list[nn.Module], kind: type[nn.Module]) -> list[Any]:
    found: list[Any] = [module for module in modules if isinstance(module, kind)]
    assert len(found) >= 2
    assert all(isinstance(module._forward_method, partial) for module in found)
    return found


@pytest.mark.parametrize("kind", [RMSNorm, RotaryEmbedding])
def test_called_as_sglangs_own_are(modules: list[nn.Module], kind: type[nn.Module]) -> None:
    """The parameters have the same names, because models pass arguments by name."""
    module = lean(modules, kind)[0]
    own, ours = (signature(f) for f in (module.forward_native, module._forward_method))
    assert list(own.parameters) == list(ours.parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("residual", [False, True])
def test_norm(modules: list[nn.Module], dtype: torch.dtype, rows: int, residual: bool) -> None:
    for norm in lean(modules, RMSNorm):
        given = [torch.randn(rows, norm.hidden_size).to(dtype) for _ in range(1 + residual)]
        wide = torch.randn(rows, 3 * norm.hidden_size).to(dtype)[:, norm.hidden_size :]
        given[0] = wide[:, : norm.hidden_size]  # a slice, as of a fused projection
        before = [tensor.clone() for tensor in given]
        expected, result = norm.forward_native(*given), norm(*given)
        assert all(map(torch.equal, given, before))
        pairs = zip(expected, result, strict=True) if residual else [(expected, result)]
        assert all(torch.equal(*pair) and pair[0].dtype == pair[1].dtype for pair in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_rope(modules: list[nn.Module], dtype: torch.dtype, rows: int) -> None:
    for rope in lean(modules, RotaryEmbedding):
        positions = torch.randint(0, len(rope.cos_sin_cache), (rows,))
        fused = torch.randn(rows, 6 * rope.head_size).to(dtype)
        query, key = fused.split([4 * rope.head_size, 2 * rope.head_size], dim=-1)
        before = fused.clone()
        expected, result = rope.forward_native(positions, query, key), rope(positions, query, key)
        assert torch.equal(fused, before)
        assert all(map(torch.equal, expected, result))
        shifted = rope(positions // 2, query, key, offsets=positions - positions // 2)
        assert all(map(torch.equal, shifted, result))


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (RMSNorm, "cast_x_before_out_mul", True),
        (RMSNorm, "fp32_residual", True),
        (RMSNorm, "override_orig_dtype", torch.float32),
        (RMSNorm, "variance_size_override", 8),
        (RotaryEmbedding, "is_neox_style", False),
        (RotaryEmbedding, "rotary_dim", 8),
        (RotaryEmbedding, "_apply_rotary_emb_wrapped", torch.compile),
    ],
)
def test_what_is_special_stays(
    modules: list[nn.Module],
    monkeypatch: pytest.MonkeyPatch,
    kind: type[nn.Module],
    field: str,
    value: object,
) -> None:
    module = lean(modules, kind)[0]
    monkeypatch.setattr(module, "_forward_method", module.forward_native)
    make_lean(module)
    assert isinstance(module._forward_method, partial)
    monkeypatch.setattr(module, "_forward_method", module.forward_native)
    monkeypatch.setattr(module, field, value)
    make_lean(module)
    assert module._forward_method == module.forward_native
