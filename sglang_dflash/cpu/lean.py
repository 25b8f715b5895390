"""Norm and RoPE in fewer operations than SGLang's own for a CPU, with the same bits."""

from __future__ import annotations

from functools import partial
from typing import TypeAlias

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.utils import apply_rotary_emb
from sglang.srt.layers.utils import MultiPlatformOp
from torch import Tensor, nn
from torch.overrides import wrap_torch_function

Normed: TypeAlias = Tensor | tuple[Tensor, Tensor]


def make_lean(model: nn.Module) -> None:
    """Let norms and RoPEs of a model run the functions below, if these equal their torch forms."""
    for module in model.modules():
        if not isinstance(module, MultiPlatformOp):
            continue
        if module._forward_method != module.forward_native:  # AMX
            continue
        if type(module) is RMSNorm:
            casts = module.cast_x_before_out_mul or module.fp32_residual
            special = module.override_orig_dtype or module.variance_size_override
            if not casts and special is None:
                module._forward_method = partial(_norm, module)
        elif type(module).forward_native is RotaryEmbedding.forward_native:
            whole = module.is_neox_style and module.rotary_dim == module.head_size
            if whole and module._apply_rotary_emb_wrapped is apply_rotary_emb:
                module._forward_method = partial(_rotate, module)


def _norm(
    module: RMSNorm,
    x: Tensor,
    residual: Tensor | None = None,
    post_residual_addition: Tensor | None = None,
) -> Normed:
    """`RMSNorm.forward_native` for float32."""
    fits = x.dtype == torch.float32 and x.shape[-1] == module.hidden_size
    if not fits or post_residual_addition is not None:
        native: Normed = module.forward_native(x, residual, post_residual_addition)
        return native
    if residual is not None:
        x = residual = x + residual
    variance = x.pow(2).mean(dim=-1, keepdim=True)
    normed = x.mul(variance.add_(module.variance_epsilon).rsqrt_()).mul_(module.weight)
    return normed if residual is None else (normed, residual)


def _rotate(
    module: RotaryEmbedding,
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    offsets: Tensor | None = None,
    fused_set_kv_buffer_arg: None = None,
) -> tuple[Tensor, Tensor]:
    """`RotaryEmbedding.forward_native` for whole heads, in the rotate-half form."""
    rotated: tuple[Tensor, Tensor]
    if offsets is not None or fused_set_kv_buffer_arg is not None:
        rotated = module.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
        return rotated
    cos, sin = cos_and_sin(module.cos_sin_cache, positions, query.dtype)
    return _turned(query, cos, sin), _turned(key, cos, sin)


@wrap_torch_function(lambda table, positions, _: (table, positions))
def cos_and_sin(table: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines, [n, 1, 1, D/2], and the sines of both halves, [n, 1, 2, D/2].

    table: [positions, D], cosines first. `cpu.graphs` lists this as one call, once per forward.
    """
    rows = table.index_select(0, positions.flatten()).to(dtype)
    cos, sin = rows[:, None, None].chunk(2, dim=-1)
    return cos, torch.cat([-sin, sin], dim=2)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    halves = x.view(len(cos), -1, 2, cos.shape[-1])
    return halves.flip(2).mul_(sin).add_(halves * cos).view(x.shape)
