"""New weights for a draft that is served: they replace all of its weights, or none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from sglang_dflash.checkpoint.config import DFlashConfig, Shape
from sglang_dflash.checkpoint.detect import read_draft, rename_weights
from sglang_dflash.checkpoint.hub import draft_folder
from sglang_dflash.checkpoint.mask_embedding import read_mask_embedding
from sglang_dflash.checkpoint.tensors import (
    Tensors,
    check_value,
    faults,
    is_rope_table,
    stored_tensors,
    weight_files,
)
from sglang_dflash.checkpoint.vocabulary_map import check_map
from sglang_dflash.errors import Refusal, shown

MASK = "mask_embedding"  # a checkpoint has it in a file of its own
ALL_OR_NOTHING = "Send all tensors of the served draft's checkpoint, by their names there."
CORRECT = "Send or write them again when they are right."
RESTART = "Start the server again with the new draft."
NAMED_FAULTS = 3  # the most that a refusal names
# What safetensors calls them.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}


def read_new(path: str, served: DFlashConfig) -> dict[str, Tensor]:
    """The weights of another checkpoint of a draft, on the CPU, as `check_new` returns them.

    path: a folder or the id of a hub. Raises `Refusal`, also for a draft of another configuration.
    """
    new, _ = read_draft(draft_folder(path, None))
    other = [
        field.name
        for field in fields(new)
        if field.name not in ("path", "format")
        and getattr(new, field.name) != getattr(served, field.name)
    ]
    if other:
        name = other[0]
        raise Refusal(
            f"The draft {path} is another one than {served.path}, which is served: its {name} is "
            f"{shown(getattr(new, name))}, not {shown(getattr(served, name))}.",
            RESTART,
        )
    named = [entry for file in weight_files(Path(new.path)) for entry in stored_tensors(file)]
    if new.mask_embedding:
        named.append((MASK, read_mask_embedding(new)))
    return check_new(named, new)


def check_new(named: Iterable[tuple[str, Tensor]], draft: DFlashConfig) -> dict[str, Tensor]:
    """The weights by the model's own names, if they are all those of this draft, and finite.

    named: tensors by the checkpoint's names. One that every checkpoint of this draft keeps in a
    file of its own is called `mask_embedding` here. Raises `Refusal` and names what is missing,
    unknown, or of another shape.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in named:
        own = rename_weights(draft, name)
        if is_rope_table(name):
            continue
        if own in tensors:
            raise Refusal(f"The new weights hold the tensor {own} twice.", ALL_OR_NOTHING)
        tensors[own] = tensor
    wrong = _faults(tensors, draft)
    if wrong:
        more = len(wrong) - NAMED_FAULTS
        named_ones = "; ".join(wrong[:NAMED_FAULTS]) + (f"; and {more} more" if more > 0 else "")
        raise Refusal(
            f"The new weights are not those of the served draft: {named_ones}.", ALL_OR_NOTHING
        )
    for name, tensor in tensors.items():
        check_value(name, tensor, draft.family.marks, "The new weights hold", CORRECT)
    if draft.vocabulary_map:
        check_map(draft, tensors["d2t"], tensors.get("t2d"))
    return tensors


def _faults(tensors: dict[str, Tensor], draft: DFlashConfig) -> list[str]:
    """Every tensor that is missing, unknown, or of another shape or kind."""
    found: dict[str, tuple[str, Shape]] = {
        name: (DTYPES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }
    wrong = []
    if draft.mask_embedding:
        _, shape = found.pop(MASK, ("", None))
        if shape is None:
            wrong.append(f"missing {MASK}")
        elif shape != (draft.hidden_size,):
            wrong.append(f"{MASK} has shape {list(shape)}, not {[draft.hidden_size]}")
    # `faults` asks nothing of a checkpoint without weights
    if not found:
        return [*wrong, "there are none"]
    return [*wrong, *faults(draft, Tensors(Path(draft.path), found))]
