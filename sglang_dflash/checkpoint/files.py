"""JSON files of a checkpoint. A broken file is refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_dflash.errors import Refusal

FETCH_AGAIN = "Fetch the checkpoint again."


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `Refusal` if the file is missing or broken."""
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        raise Refusal(
            f"The file {file} does not exist.",
            "Give the folder of a checkpoint, which holds config.json.",
        ) from None
    except OSError as error:
        raise Refusal(f"The file {file} cannot be read ({error}).", FETCH_AGAIN) from None
    return parse_object(text, file)


def parse_object(text: bytes, file: Path) -> dict[str, Any]:
    """Parse a JSON object. Raises `Refusal` for any other text, which names `file`."""
    try:
        value = json.loads(text)
    except ValueError as error:  # no JSON, or no text
        raise Refusal(f"The file {file} cannot be read as JSON ({error}).", FETCH_AGAIN) from None
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise Refusal(f"The file {file} holds a {kind}, not a JSON object.", FETCH_AGAIN)
    return value
