"""Checkpoints by their id on the model hub. The name of a local folder is not an id."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import get_safetensors_metadata, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    NotASafetensorsRepoError,
)

from sglang_dflash.checkpoint.detect import format_of
from sglang_dflash.checkpoint.files import read_json
from sglang_dflash.checkpoint.tensors import Shape, Tensors
from sglang_dflash.errors import Refusal

UNREACHABLE = (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError)
CONFIGS, WEIGHTS = ["*.json", "mask_embedding.pt"], "*.safetensors"


def is_id(name: str) -> bool:
    """Whether a name is the id of a model on the hub, not a local folder."""
    return name.count("/") == 1 and not name.startswith((".", "/")) and not Path(name).exists()


def draft_folder(name: str, revision: str | None = None) -> Path:
    """The folder of a draft with its weights, which are fetched if needed. Raises `Refusal`."""
    if not is_id(name):
        return Path(name)
    try:
        file = Path(hf_hub_download(name, "config.json", revision=revision))
        format_of(read_json(file), file)  # before any weight is fetched
        return Path(snapshot_download(name, revision=revision, allow_patterns=[*CONFIGS, WEIGHTS]))
    except UNREACHABLE as error:
        raise _neither(name, error) from None


def config_folder(name: str) -> Path:
    """The folder of a draft or target. From the hub, only configs are fetched. Raises `Refusal`."""
    if not is_id(name):
        return Path(name)
    try:
        return Path(snapshot_download(name, allow_patterns=CONFIGS))
    except UNREACHABLE as error:
        raise _neither(name, error) from None


def remote_headers(name: str, folder: Path) -> Tensors | None:
    """The hub's safetensors headers of a model. None if `folder` holds its weights, or on failure.

    The tensors have the checkpoint's names.
    """
    if not is_id(name) or any(folder.glob(WEIGHTS)):
        return None
    try:
        files = get_safetensors_metadata(name).files_metadata.values()
    except (NotASafetensorsRepoError, *UNREACHABLE):
        return None
    found: dict[str, tuple[str, Shape]] = {}
    for file in files:
        for tensor, info in file.tensors.items():
            found[tensor] = (info.dtype, tuple(info.shape))
    return Tensors(folder, found)


def _neither(name: str, error: Exception) -> Refusal:
    reason = " ".join(str(error).split()).rstrip(".")
    return Refusal(
        f"The name {name!r} is not a local folder, and the model hub does not have it: {reason}.",
        "Give the path of a folder, or the id of a model that this machine can fetch.",
    )
