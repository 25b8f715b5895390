"""The draft that a server is started with: read once, refused by name."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from sglang_dflash.checkpoint import hub
from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.checkpoint.detect import format_of, read_draft
from sglang_dflash.checkpoint.files import read_json
from sglang_dflash.checkpoint.tensors import Tensors
from sglang_dflash.errors import Refusal


@lru_cache(maxsize=8)
def load_draft(path: str, revision: str | None) -> tuple[DFlashConfig, Tensors]:
    """Configuration and headers of a draft, from a local folder or the model hub, read once."""
    return read_draft(hub.draft_folder(path, revision))


@lru_cache(maxsize=32)
def is_draft(path: str, revision: str | None) -> bool:
    """Whether the config.json of a folder or a hub id describes a DFlash draft.

    SGLang reads targets by the same functions as drafts, and this package may not read them. So a
    config that cannot be had or read is that of no draft here. The answer is kept.
    """
    try:
        file = hub.config_file(path, revision)
        format_of(read_json(file), file)
    except Refusal:
        return False
    return True


def served_draft(server_args: Any) -> tuple[DFlashConfig, Tensors]:
    """The draft that server arguments name, and its tensors; raises `Refusal`."""
    if server_args.speculative_draft_model_path is None:
        raise Refusal(
            "--speculative-algorithm DFLASH needs a draft.", "Give --speculative-draft-model-path."
        )
    return load_draft(
        server_args.speculative_draft_model_path, server_args.speculative_draft_model_revision
    )


def draft_config(server_args: Any) -> DFlashConfig:
    """The draft of these server arguments; raises `Refusal`."""
    return served_draft(server_args)[0]
