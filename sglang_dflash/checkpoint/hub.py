"""Checkpoints by their id on the model hub. The name of a local folder is not an id."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from httpx import HTTPError
from huggingface_hub import (
    get_safetensors_metadata,
    hf_hub_download,
    list_repo_files,
    parse_safetensors_file_metadata,
    snapshot_download,
)
from huggingface_hub.errors import HfHubHTTPError, SafetensorsParsingError

from sglang_dflash.checkpoint.config import Shape
from sglang_dflash.checkpoint.detect import format_of
from sglang_dflash.checkpoint.files import FETCH_AGAIN, read_json
from sglang_dflash.checkpoint.tensors import INDEX, Tensors, is_rope_table
from sglang_dflash.errors import Refusal, Unreachable, shown

FAILURES = (HTTPError, OSError, ValueError)  # ValueError: a name that is no id, or no JSON
TOO_MANY_REQUESTS, SERVER_ERROR = 429, 500  # HTTP
# The hub's client reads headers as they are, so a broken one raises any of these.
BROKEN_HEADERS = (SafetensorsParsingError, TypeError, AttributeError, LookupError, RecursionError)
CONFIGS, WEIGHTS = ["*.json", "mask_embedding.pt"], "*.safetensors"


def is_id(name: str) -> bool:
    """Whether a name is the id of a model on the hub, not a local folder."""
    return name.count("/") == 1 and not name.startswith((".", "/")) and not os.path.lexists(name)


def draft_folder(name: str, revision: str | None = None) -> Path:
    """The folder of a draft with its weights, which are fetched if needed. Raises `Refusal`."""
    if not is_id(name):
        return Path(name)
    file = config_file(name, revision)
    format_of(read_json(file), file)  # before any weight is fetched
    with _asking_for(name):
        return Path(snapshot_download(name, revision=revision, allow_patterns=[*CONFIGS, WEIGHTS]))


def config_file(name: str, revision: str | None = None) -> Path:
    """The config.json of a draft or target, which is fetched if needed. Raises `Refusal`."""
    if not is_id(name):
        return Path(name) / "config.json"
    with _asking_for(name):
        return Path(hf_hub_download(name, "config.json", revision=revision))


def config_folder(name: str) -> Path:
    """The folder of a draft or target. From the hub, only configs are fetched. Raises `Refusal`."""
    if not is_id(name):
        return Path(name)
    with _asking_for(name):
        return Path(snapshot_download(name, allow_patterns=CONFIGS))


def remote_headers(name: str, folder: Path) -> Tensors | None:
    """The hub's safetensors headers of a model. None if `folder` or no file holds its weights.

    The tensors have the checkpoint's names. Raises `Refusal`.
    """
    if not is_id(name) or any(folder.glob(WEIGHTS)):
        return None
    try:
        with _asking_for(name):
            files = _weight_files(name)
    except BROKEN_HEADERS as error:
        raise _broken(name, f"{type(error).__name__}: {error}") from None
    if not files:
        return None
    found: dict[str, tuple[str, Shape]] = {}
    for file in files:
        for tensor, info in file.tensors.items():
            if is_rope_table(tensor):
                continue
            sizes: list[Any] = info.shape if isinstance(info.shape, list) else [None]
            if any(type(size) is not int or size < 0 for size in sizes):
                raise _broken(name, f"{shown(tensor)} has shape {shown(info.shape)}")
            found[tensor] = (str(info.dtype), tuple(sizes))
    return Tensors(folder, found)


def _weight_files(name: str) -> list[Any]:
    """The headers of the files that hold a model's weights, as `tensors.weight_files` has them."""
    files = list_repo_files(name)
    if INDEX in files:
        return list(get_safetensors_metadata(name).files_metadata.values())
    weights = [file for file in files if fnmatch(file, WEIGHTS) and "/" not in file]
    return [parse_safetensors_file_metadata(name, file) for file in weights]


@contextlib.contextmanager
def _asking_for(name: str) -> Iterator[None]:
    """Turn a failure of the hub in the body into a `Refusal`."""
    try:
        yield
    except FAILURES as error:
        raise _refusal(name, error) from None


def _broken(name: str, reason: str) -> Refusal:
    return Refusal(f"The hub's headers of {name} cannot be read ({reason}).", FETCH_AGAIN)


def _refusal(name: str, error: Exception) -> Refusal:
    """The refusal of a name: the hub does not have it, or it did not answer."""
    reason = " ".join(str(error).split()).rstrip(".")
    what = f"The name {name!r} is not a local folder, and the model hub"
    if _is_answer(error):
        return Refusal(
            f"{what} does not have it: {reason}.",
            "Give the path of a folder, or the id of a model that this machine can fetch.",
        )
    return Unreachable(
        f"{what} did not answer: {reason}.",
        "Try again when this machine reaches the hub, or give the path of a folder.",
    )


def _is_answer(error: Exception) -> bool:
    """Whether the hub, or the form of the name, has decided that there is no such checkpoint."""
    if isinstance(error, HfHubHTTPError):
        status: int = error.response.status_code
        return status < SERVER_ERROR and status != TOO_MANY_REQUESTS
    return isinstance(error, ValueError)
