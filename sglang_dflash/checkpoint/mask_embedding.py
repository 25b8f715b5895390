"""The embedding of the mask, from mask_embedding.pt: a tensor, or a dict with one tensor."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.checkpoint.fields import CORRECT_CONFIG
from sglang_dflash.checkpoint.files import FETCH_AGAIN, read_file
from sglang_dflash.checkpoint.tensors import MASK_EMBEDDING
from sglang_dflash.errors import WRONG_WEIGHTS, Refusal, shown

BYTES_PER_VALUE = 8  # at most
OVERHEAD = 65_536  # bytes of the archive and its pickle


def read_mask_embedding(config: DFlashConfig) -> Tensor:
    """The mask's embedding, [hidden_size]. Raises `Refusal`."""
    file = Path(config.path) / MASK_EMBEDDING
    content = read_file(file, OVERHEAD + BYTES_PER_VALUE * config.hidden_size)
    try:
        if not zipfile.is_zipfile(io.BytesIO(content)):  # of older files torch believes the sizes
            raise ValueError("it is not what torch.save writes")
        value = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except WRONG_WEIGHTS as error:
        reason = f"{type(error).__name__}: {error}"
        raise Refusal(f"The file {file} cannot be read ({reason}).", FETCH_AGAIN) from None
    if isinstance(value, dict):
        stated = value.get("mask_token_id", config.mask_token_id)
        if stated != config.mask_token_id:
            raise Refusal(
                f"The file {file} is for mask {shown(stated)}, the config says "
                f"{config.mask_token_id}.",
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
    if not bool(torch.isfinite(value).all()):
        raise Refusal(f"The file {file} holds NaN or infinity.", FETCH_AGAIN)
    return value.flatten()
