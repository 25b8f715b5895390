"""Loads a draft's weights strictly: all of them, nothing else, finite."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import Tensor, nn

from sglang_dflash.checkpoint import rename_weights
from sglang_dflash.config import DFlashConfig
from sglang_dflash.errors import Refusal

STACKED = (  # (parameter, checkpoint name, shard)
    ("qkv_proj", "q_proj", "q"),
    ("qkv_proj", "k_proj", "k"),
    ("qkv_proj", "v_proj", "v"),
    ("gate_up_proj", "gate_proj", 0),
    ("gate_up_proj", "up_proj", 1),
)


def load(model: nn.Module, config: DFlashConfig, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Fill a draft model. Raises `Refusal` for missing, unexpected or non-finite tensors."""
    places: dict[str, Tensor] = dict(model.named_parameters())
    if config.vocabulary_map:
        places["d2t"] = model.get_buffer("d2t")
    missing = {(name, shard) for name in places for shard in _shards(name)}
    unexpected = []
    target_mask: Tensor | None = None
    for checkpoint_name, tensor in weights:
        own = rename_weights(config, checkpoint_name)
        if own == "t2d" and config.vocabulary_map:
            target_mask = tensor
            continue
        name, shard = _stacked(own)
        if (name, shard) not in missing:
            unexpected.append(checkpoint_name)
            continue
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
            raise Refusal(
                f"The draft {config.path} holds NaN or infinity in {checkpoint_name}: fetch it "
                "again."
            )
        missing.remove((name, shard))
        place = places[name]
        loader = getattr(place, "weight_loader", default_weight_loader)
        loader(place, tensor) if shard is None else loader(place, tensor, shard)
    if missing or unexpected:
        gone = sorted(name if shard is None else f"{name}[{shard}]" for name, shard in missing)
        raise Refusal(
            f"The draft {config.path} does not hold the weights of a {config.format} DFlash draft: "
            f"missing {gone or 'none'}, unexpected {unexpected or 'none'}."
        )
    if config.vocabulary_map:
        _check_map(config, places["d2t"], target_mask)
    if config.mask_embedding:
        model.get_buffer("mask_embedding").copy_(read_mask_embedding(config))


def _check_map(config: DFlashConfig, offsets: Tensor, target_mask: Tensor | None) -> None:
    """d2t must map draft ids to distinct ids of the target, the ones that t2d marks."""
    ids = torch.arange(len(offsets), device=offsets.device) + offsets
    good = (
        int(ids.min()) >= 0 and int(ids.max()) < config.vocab_size and len(ids.unique()) == len(ids)
    )
    if good and target_mask is not None:
        marked = target_mask.to(ids.device).nonzero().flatten()
        good = torch.equal(ids.sort().values, marked)
    if not good:
        raise Refusal(
            f"The draft {config.path} has a vocabulary map d2t that does not fit its target of "
            f"{config.vocab_size} tokens{'' if target_mask is None else ' or its t2d'}."
        )


def read_mask_embedding(config: DFlashConfig) -> Tensor:
    """The mask's embedding from mask_embedding.pt: a tensor, or a dict that holds one. [H]."""
    file = Path(config.path) / "mask_embedding.pt"
    try:
        value = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        raise Refusal(f"{file} cannot be read: {error}") from None
    if isinstance(value, dict):
        stated = value.get("mask_token_id", config.mask_token_id)
        if stated != config.mask_token_id:
            raise Refusal(f"{file} is for mask {stated}, the config says {config.mask_token_id}.")
        tensors = [v for v in value.values() if isinstance(v, Tensor)]
        value = tensors[0] if len(tensors) == 1 else None
    if not isinstance(value, Tensor) or value.numel() != config.hidden_size:
        raise Refusal(f"{file} must hold one tensor of {config.hidden_size} values.")
    return value.flatten()


def _stacked(name: str) -> tuple[str, str | int | None]:
    for parameter, part, shard in STACKED:
        if f".{part}." in name:
            return name.replace(part, parameter), shard
    return name, None


def _shards(name: str) -> list[str | int | None]:
    return [shard for parameter, _, shard in STACKED if f".{parameter}." in name] or [None]
