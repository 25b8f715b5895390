"""The detection table. Adding a format is adding a module with `matches`, `read` and `rename`."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

from sglang_dflash.checkpoint import speculators, zlab
from sglang_dflash.checkpoint.others import other_method
from sglang_dflash.checkpoint.tensors import Tensors, read_headers
from sglang_dflash.config import DFlashConfig
from sglang_dflash.errors import Refusal

FORMATS: dict[str, ModuleType] = {"speculators": speculators, "zlab": zlab}  # first match wins


def read_json(path: Path) -> dict[str, Any]:
    """The object in a config file, or a refusal that names the file."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise Refusal(f"{path} does not exist: a draft is a folder with config.json.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise Refusal(f"{path} cannot be read as JSON ({error}): fetch it again.") from None
    if not isinstance(value, dict):
        raise Refusal(f"{path} holds a {type(value).__name__}, not a JSON object: fetch it again.")
    return value


def format_of(raw: dict[str, Any], where: Path) -> str:
    """The name in `FORMATS` of a config; raises `Refusal` for other methods and unknown ones."""
    if other := other_method(raw):
        raise Refusal(f"{where}: {other}")
    for name, adapter in FORMATS.items():
        if adapter.matches(raw):
            return name
    raise Refusal(
        f"{where} is no DFlash draft that is read here: architectures {raw.get('architectures')}, "
        f"model_type {raw.get('model_type')!r}; use one of the formats {', '.join(FORMATS)}."
    )


def load(path: str | Path, headers: Tensors | None = None) -> tuple[DFlashConfig, Tensors]:
    """Read a local checkpoint folder, configs and headers only; raises `Refusal`.

    `headers`: tensors by the checkpoint's names, where its files are not in the folder.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise Refusal(f"The draft {folder} is not a folder: give the path of a DFlash checkpoint.")
    raw = read_json(folder / "config.json")
    name = format_of(raw, folder / "config.json")
    adapter = FORMATS[name]
    if headers is None:
        tensors = read_headers(folder, adapter.rename)
    else:
        found = {adapter.rename(tensor): entry for tensor, entry in headers.found.items()}
        tensors = Tensors(folder, found)
    return adapter.read(raw, str(folder), name, tensors), tensors


def load_config(path: str | Path) -> DFlashConfig:
    """The draft's configuration from a local checkpoint folder; raises `Refusal`."""
    return load(path)[0]


def rename_weights(config: DFlashConfig, name: str) -> str:
    """The draft model's own name of a checkpoint tensor."""
    renamed: str = FORMATS[config.format].rename(name)
    return renamed
