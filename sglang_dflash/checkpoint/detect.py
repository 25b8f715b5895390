"""Which format a draft has. A format is a module of `checkpoint.formats`."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from sglang_dflash.checkpoint import formats
from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.checkpoint.fields import Fields, Name, Names, Place
from sglang_dflash.checkpoint.files import read_json
from sglang_dflash.checkpoint.others import other_method
from sglang_dflash.checkpoint.tensors import Tensors, read_headers
from sglang_dflash.errors import Refusal, shown

MODELOPT_CONFIG = "hf_quant_config.json"
# speculators' configs may also have the class of a family, and those of a family z-lab's class.
FIRST, LAST = "speculators", "zlab"


class Kind(Fields):
    """Fields that name a format. They hold names, on which `matches` of the formats relies."""

    model_type: Name | None = None
    speculators_model_type: Name | None = None
    projector_type: Name | None = None


def _formats() -> dict[str, ModuleType]:
    """Each module of `checkpoint.formats` by its name, which has `matches`, `read` and `rename`."""
    names = [module.name for module in iter_modules(formats.__path__)]
    names.sort(key=lambda name: (name != FIRST, name == LAST, name))
    return {name: import_module(f"{formats.__name__}.{name}") for name in names}


FORMATS = _formats()  # the first match wins


def format_of(raw: dict[str, Any], file: Path) -> str:
    """The name in `FORMATS` of a config. Raises `Refusal` for other methods and unknown ones.

    raw: the config. file: its name in the refusal.
    """
    top = Place(raw, str(file))
    top.one("architectures", Names)
    for place in (top, top.section("dflash_config")):
        place.read(Kind)
    matching = [name for name, adapter in FORMATS.items() if adapter.matches(raw)]
    found = matching[0] if matching else None
    other = other_method(raw, file, found)
    if other is not None:
        raise other
    if found is not None:
        return found
    raise Refusal(
        f"The file {file} describes no DFlash draft of a known format: architectures "
        f"{shown(raw.get('architectures'))}, model_type {shown(raw.get('model_type'))}.",
        f"Use one of the formats {', '.join(FORMATS)}.",
    )


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
