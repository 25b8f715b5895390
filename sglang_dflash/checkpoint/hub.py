"""Checkpoints by the id of the model hub, where the name is no folder here."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import get_safetensors_metadata, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    NotASafetensorsRepoError,
)

from sglang_dflash.checkpoint.detect import format_of, read_json
from sglang_dflash.checkpoint.tensors import Tensors
from sglang_dflash.errors import Refusal

UNREACHABLE = (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError)
CONFIGS, WEIGHTS = ["*.json", "mask_embedding.pt"], "*.safetensors"


def is_id(name: str) -> bool:
    """Whether this names a model of the hub, not a folder."""
    return name.count("/") == 1 and not name.startswith((".", "/")) and not Path(name).exists()


def draft_folder(name: str, revision: str | None = None) -> Path:
    """The folder of a draft with its weights, fetched where need be; raises `Refusal`."""
    if not is_id(name):
        return Path(name)
    try:
        file = Path(hf_hub_download(name, "config.json", revision=revision))
        format_of(read_json(file), file)  # before any weight is fetched
        return Path(snapshot_download(name, revision=revision, allow_patterns=[*CONFIGS, WEIGHTS]))
    except UNREACHABLE as error:
        raise _neither(name, error) from None


def config_folder(name: str) -> Path:
    """The folder of a draft or target; from the hub come configs alone. Raises `Refusal`."""
    if not is_id(name):
        return Path(name)
    try:
        return Path(snapshot_download(name, allow_patterns=CONFIGS))
    except UNREACHABLE as error:
        raise _neither(name, error) from None


def remote_headers(name: str, folder: Path) -> Tensors | None:
    """The hub's safetensors headers of a model whose weights are not in `folder`; else None."""
    if not is_id(name) or any(folder.glob(WEIGHTS)):
        return None
    try:
        files = get_safetensors_metadata(name).files_metadata.values()
    except (NotASafetensorsRepoError, *UNREACHABLE):
        return None
    found: dict[str, tuple[str, tuple[int, ...]]] = {
        tensor: (info.dtype, tuple(info.shape))
        for file in files
        for tensor, info in file.tensors.items()
    }
    return Tensors(folder, found)


def _neither(name: str, error: Exception) -> Refusal:
    reason = " ".join(str(error).split())
    return Refusal(f"{name!r} is neither a folder here nor to be had from the model hub: {reason}")
