"""What a checkpoint brings beside its weights: a vocabulary map, a mask embedding."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sglang_dflash.config import DFlashConfig
from sglang_dflash.errors import Refusal


def check_map(config: DFlashConfig, offsets: Tensor, target_mask: Tensor | None) -> None:
    """d2t must map draft ids to distinct ids of the target, the ones that t2d marks."""
    ids = torch.arange(len(offsets), device=offsets.device) + offsets
    good = (
        int(ids.min()) >= 0
        and int(ids.max()) < config.vocab_size
        and len(set(ids.tolist())) == len(ids)
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
