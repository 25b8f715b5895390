"""The table of formats. A format is a module with `matches`, `read` and `rename`."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.checkpoint.fields import Fields
from sglang_dflash.checkpoint.files import read_json
from sglang_dflash.checkpoint.formats import dflash2, domino, dspark, speculators, zlab
from sglang_dflash.checkpoint.formats.others import other_method
from sglang_dflash.checkpoint.tensors import Tensors, read_headers
from sglang_dflash.errors import Refusal, shown

MODELOPT_CONFIG = "hf_quant_config.json"
FORMATS: dict[str, ModuleType] = {  # the first match wins
    "speculators": speculators,
    "domino": domino,
    "dspark": dspark,
    "dflash2": dflash2,
    "zlab": zlab,
}


def format_of(raw: dict[str, Any], file: Path) -> str:
    """The name in `FORMATS` of a config. Raises `Refusal` for other methods and unknown ones.

    raw: the config. file: its name in the refusal.
    """
    _check_names(Fields(raw, str(file)))
    other = other_method(raw, file)
    if other is not None:
        raise other
    for name, adapter in FORMATS.items():
        if adapter.matches(raw):
            return name
    raise Refusal(
        f"The file {file} describes no DFlash draft of a known format: architectures "
        f"{shown(raw.get('architectures'))}, model_type {shown(raw.get('model_type'))}.",
        f"Use one of the formats {', '.join(FORMATS)}.",
    )


def _check_names(top: Fields) -> None:
    """Raise `Refusal` unless the fields that name a format hold names. Adapters rely on it."""
    top.names("architectures")
    for fields in (top, top.section("dflash_config")):
        for key in ("model_type", "speculators_model_type", "projector_type"):
            fields.optional_name(key)


def read_draft(path: str | Path, headers: Tensors | None = None) -> tuple[DFlashConfig, Tensors]:
    """Read configs and headers of a local checkpoint folder. Raises `Refusal`.

    headers: tensors by the checkpoint's names, if its weights are not in the folder.
    """
    folder = Path(path)
    if not os.path.isdir(folder):
        raise Refusal(
            f"The draft {folder} is not a folder.", "Give the path of a DFlash checkpoint."
        )
    file = folder / "config.json"
    raw = read_json(file)
    name = format_of(raw, file)
    adapter = FORMATS[name]
    if headers is None:
        tensors = read_headers(folder, adapter.rename)
    else:
        renamed = {adapter.rename(tensor): entry for tensor, entry in headers.found.items()}
        tensors = Tensors(folder, renamed)
    config: DFlashConfig = adapter.read(raw, str(folder), name, tensors)
    if config.quantization is None and os.path.lexists(folder / MODELOPT_CONFIG):
        raise Refusal(
            f"The folder {folder} holds {MODELOPT_CONFIG}, by which SGLang would quantise "
            "the draft.",
            "Use a draft whose config.json states its quantization_config.",
        )
    return config, tensors


def load_config(path: str | Path) -> DFlashConfig:
    """The configuration of a draft in a local checkpoint folder. Raises `Refusal`."""
    return read_draft(path)[0]


def rename_weights(config: DFlashConfig, name: str) -> str:
    """The draft model's name of the checkpoint's tensor `name`."""
    renamed: str = FORMATS[config.format].rename(name)
    return renamed
