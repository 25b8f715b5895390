"""Opens the files of a checkpoint, and takes each as hostile input.

A file must be regular and lie in its folder, and no more of it is read than a limit of its kind
says. A broken file is refused by its name. docs/checkpoints.md says which checkpoints are read.
`tensors.py` hands files of weights to the safetensors library, but only those that open here.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from sglang_dflash.errors import Refusal

FETCH_AGAIN = "Fetch the checkpoint again."
OTHER_CHECKPOINT = "Use another checkpoint: docs/checkpoints.md lists the bounds."
MB = 10**6
CONFIG_LIMIT = 4 * MB  # bytes; a list of a target's layers that are not quantised may take one
JSON_LIMIT = 24 * MB  # an index of 200,000 tensors, or a tokenizer; parsed it takes 20 times more
DEPTH_LIMIT = 32  # objects and lists inside each other; deeper ones exhaust Python's stack


def open_file(file: Path) -> BinaryIO:
    """Open a file of a checkpoint for reading. Raises `Refusal`.

    file: a path in the checkpoint's folder. The folder may be reached through links.
    """
    if not _lies_in_its_folder(file):
        raise Refusal(
            f"The file {file} is a link that leads out of its folder.",
            "Put the file itself into the folder.",
        )
    try:
        stream = open(file, "rb", opener=_without_waiting)  # noqa: SIM115 - the caller closes it
    except FileNotFoundError:
        raise Refusal(
            f"The file {file} does not exist.",
            "Give the folder of a checkpoint, which holds config.json.",
        ) from None
    except OSError as error:
        raise _unreadable(file, error) from None
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise Refusal(f"The file {file} is a pipe or a device.", FETCH_AGAIN)
    return stream


def _without_waiting(path: str, flags: int) -> int:
    """Open a path. Without this flag, a pipe would be opened only when someone writes to it."""
    return os.open(path, flags | os.O_NONBLOCK)


def _lies_in_its_folder(file: Path) -> bool:
    """Whether a file lies in its folder when all links are followed.

    In the hub's cache, files are links from snapshots/<revision> to its folder of blobs.
    """
    folder, real = Path(os.path.realpath(file.parent)), Path(os.path.realpath(file))
    if folder.parent.name == "snapshots" and real.parent == folder.parent.parent / "blobs":
        return True
    return real.is_relative_to(folder)


def _unreadable(file: Path, error: OSError) -> Refusal:
    return Refusal(f"The file {file} cannot be read ({error.strerror}).", FETCH_AGAIN)


def read_file(file: Path, limit: int) -> bytes:
    """The whole content of a file. Raises `Refusal`, also for more than `limit` bytes."""
    try:
        with open_file(file) as stream:
            content = stream.read(limit + 1)
    except OSError as error:
        raise _unreadable(file, error) from None
    if len(content) > limit:
        raise Refusal(f"The file {file} has more than {limit:,} bytes.", OTHER_CHECKPOINT)
    return content


def read_json(file: Path, limit: int = CONFIG_LIMIT) -> dict[str, Any]:
    """The object in a JSON file. Raises `Refusal` if the file is missing or broken.

    It is UTF-8 without a mark of the byte order, because SGLang reads an index as such.
    """
    content = read_file(file, limit)
    try:
        value = json.loads(content.decode(), object_pairs_hook=_with_distinct_keys)
    except RecursionError:
        raise _nested(file) from None
    except ValueError as error:  # no JSON, or no text
        raise Refusal(f"The file {file} cannot be read as JSON ({error}).", FETCH_AGAIN) from None
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise Refusal(f"The file {file} holds a {kind}, not a JSON object.", FETCH_AGAIN)
    if _is_deep(value):
        raise _nested(file)
    return value


def _with_distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs. Readers disagree about which one of two equal keys counts."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("an object states a key twice")
    return value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEPTH_LIMIT):
        parts: list[Any] = []
        for outer in level:
            if isinstance(outer, dict):
                parts += outer.values()
            elif isinstance(outer, list):
                parts += outer
        level = parts
    return bool(level)


def _nested(file: Path) -> Refusal:
    what = f"The file {file} has more than {DEPTH_LIMIT} lists and objects inside each other."
    return Refusal(what, OTHER_CHECKPOINT)
