"""The table of formats. A format is a module with `matches`, `read` and `rename`."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from sglang_dflash.checkpoint import dflash2, domino, dspark, speculators, zlab
from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.checkpoint.files import read_json
from sglang_dflash.checkpoint.others import other_method
from sglang_dflash.checkpoint.tensors import Tensors, read_headers
from sglang_dflash.errors import Refusal

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
    other = other_method(raw, file)
    if other is not None:
        raise other
    for name, adapter in FORMATS.items():
        if adapter.matches(raw):
            return name
    raise Refusal(
        f"The file {file} describes no DFlash draft of a known format: architectures "
        f"{raw.get('architectures')}, model_type {raw.get('model_type')!r}.",
        f"Use one of the formats {', '.join(FORMATS)}.",
    )


def load(path: str | Path, headers: Tensors | None = None) -> tuple[DFlashConfig, Tensors]:
    """Read configs and headers of a local checkpoint folder. Raises `Refusal`.

    headers: tensors by the checkpoint's names, if its weights are not in the folder.
    """
    folder = Path(path)
    if not folder.is_dir():
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
    return adapter.read(raw, str(folder), name, tensors), tensors


def load_config(path: str | Path) -> DFlashConfig:
    """The configuration of a draft in a local checkpoint folder. Raises `Refusal`."""
    return load(path)[0]


def rename_weights(config: DFlashConfig, name: str) -> str:
    """The draft model's name of the checkpoint's tensor `name`."""
    renamed: str = FORMATS[config.format].rename(name)
    return renamed
