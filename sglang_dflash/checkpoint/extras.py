"""Parts of a checkpoint beside its layers: a vocabulary map and a mask embedding."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor

from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.checkpoint.fields import CORRECT_CONFIG
from sglang_dflash.checkpoint.files import FETCH_AGAIN
from sglang_dflash.errors import Refusal

# torch.load raises any of these for a file that is no tensor, depending on its first bytes.
UNREADABLE = (OSError, RuntimeError, ValueError, EOFError, LookupError, UnpicklingError)


def check_map(config: DFlashConfig, offsets: Tensor, target_mask: Tensor | None) -> None:
    """Raise `Refusal` unless d2t maps draft ids to distinct ids of the target.

    offsets: d2t [draft vocabulary], target id minus draft id. target_mask: t2d [target vocabulary],
    True for every id that d2t must reach. None if the checkpoint has no t2d.
    """
    ids = torch.arange(len(offsets), device=offsets.device) + offsets
    in_vocabulary = int(ids.min()) >= 0 and int(ids.max()) < config.vocab_size
    distinct = len(set(ids.tolist())) == len(ids)
    as_marked = True
    if target_mask is not None:
        marked = target_mask.to(ids.device).nonzero().flatten()
        as_marked = torch.equal(ids.sort().values, marked)
    if not (in_vocabulary and distinct and as_marked):
        mask = "" if target_mask is None else " or its t2d"
        raise Refusal(
            f"The draft {config.path} has a vocabulary map d2t that does not fit its target of "
            f"{config.vocab_size} tokens{mask}.",
            FETCH_AGAIN,
        )


def read_mask_embedding(config: DFlashConfig) -> Tensor:
    """The mask's embedding [hidden_size] from mask_embedding.pt. Raises `Refusal`.

    The file holds a tensor, or a dict with one tensor and maybe the mask's id.
    """
    file = Path(config.path) / "mask_embedding.pt"
    try:
        value = torch.load(file, map_location="cpu", weights_only=True)
    except UNREADABLE as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise Refusal(f"The file {file} cannot be read ({reason}).", FETCH_AGAIN) from None
    if isinstance(value, dict):
        stated = value.get("mask_token_id", config.mask_token_id)
        if stated != config.mask_token_id:
            raise Refusal(
                f"The file {file} is for mask {stated}, the config says {config.mask_token_id}.",
                CORRECT_CONFIG,
            )
        if value.get("per_position"):
            raise Refusal(
                f"The file {file} holds an embedding for each position of the block, and no "
                "implementation is known that says how they are used.",
                "Use a draft with one mask embedding.",
            )
        tensors = [entry for entry in value.values() if isinstance(entry, Tensor)]
        value = tensors[0] if len(tensors) == 1 else None
    if not isinstance(value, Tensor) or value.numel() != config.hidden_size:
        raise Refusal(
            f"The file {file} does not hold one tensor of {config.hidden_size} values.", FETCH_AGAIN
        )
    return value.flatten()
