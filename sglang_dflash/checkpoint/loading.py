"""Loads a draft's weights strictly: all of them and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from sglang_dflash.checkpoint import rename_weights
from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.checkpoint.files import FETCH_AGAIN
from sglang_dflash.checkpoint.tensors import is_rope_table
from sglang_dflash.checkpoint.vocabulary_map import check_map
from sglang_dflash.errors import Refusal

Shard = str | int  # SGLang's name of a part of a stacked parameter
STACKED: tuple[tuple[str, str, Shard], ...] = (  # (parameter, its part in the checkpoint, shard)
    ("self_attn.qkv_proj", "self_attn.q_proj", "q"),
    ("self_attn.qkv_proj", "self_attn.k_proj", "k"),
    ("self_attn.qkv_proj", "self_attn.v_proj", "v"),
    ("mlp.gate_up_proj", "mlp.gate_proj", 0),
    ("mlp.gate_up_proj", "mlp.up_proj", 1),
)

OF_LAYER = re.compile(r"layers\.\d+\.")  # of the draft. Heads have layers of their own


def load(
    model: nn.Module,
    config: DFlashConfig,
    weights: Iterable[tuple[str, Tensor]],
    copy: Callable[[Tensor, Tensor], None],
) -> None:
    """Fill a draft model.

    weights: tensors by the checkpoint's names. copy(parameter, tensor) loads a parameter that has
    no `weight_loader` of its own. Raises `Refusal` for missing or unexpected tensors, and for a
    vocabulary map or a mask embedding that does not fit.

    The values are not checked here: `refusals.check_draft` has scanned the files for NaN and marks
    that are false before any process started.
    """
    parameters: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        parameters[name.removeprefix("head.")] = weight  # a checkpoint has a head's at its top
    if config.vocabulary_map:
        parameters["d2t"] = model.get_buffer("d2t")
    if config.mask_embedding:
        parameters["mask_embedding"] = model.get_buffer("mask_embedding")
    missing = {(name, shard) for name in parameters for shard in _shards(name)}
    unexpected = []
    target_mask: Tensor | None = None
    for checkpoint_name, tensor in weights:
        if is_rope_table(checkpoint_name):
            continue
        own = rename_weights(config, checkpoint_name)
        if own == "t2d" and config.vocabulary_map:
            target_mask = tensor
            continue
        if own in config.family.marks:
            continue
        name, shard = _stacked(own)
        if (name, shard) not in missing:
            unexpected.append(checkpoint_name)
            continue
        missing.remove((name, shard))
        parameter = parameters[name]
        loader: Any = getattr(parameter, "weight_loader", copy)
        if shard is None:
            loader(parameter, tensor)
        else:
            loader(parameter, tensor, shard)
    if missing or unexpected:
        gone = sorted(name if shard is None else f"{name}[{shard}]" for name, shard in missing)
        raise Refusal(
            f"The draft {config.path} does not hold the weights of a {config.format} draft: "
            f"missing {gone or 'none'}, unexpected {unexpected or 'none'}.",
            FETCH_AGAIN,
        )
    if config.vocabulary_map:
        check_map(config, parameters["d2t"], target_mask)


def _stacked(name: str) -> tuple[str, Shard | None]:
    """The parameter that holds a tensor, and the tensor's shard of it. None: it is not stacked."""
    for parameter, part, shard in STACKED:
        if OF_LAYER.match(name) and f".{part}." in name:
            return name.replace(part, parameter), shard
    return name, None


def _shards(name: str) -> list[Shard | None]:
    """The shards of a parameter, one per tensor of the checkpoint. [None]: it is not stacked."""
    return [shard for parameter, _, shard in STACKED if f".{parameter}." in name] or [None]
