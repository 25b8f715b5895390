"""DSpark checkpoints of DeepSpec and SpecForge: z-lab's fields, and those of the heads.

DeepSpec has all fields at the top level (`Qwen3DSparkModel`), SpecForge those of the method in
`dflash_config` or `dspark_config` (`DSparkDraftModel`). Their drafts predict from the anchor unless
they state otherwise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.checkpoint.formats import zlab
from sglang_dflash.checkpoint.heads import read_confidence, read_markov
from sglang_dflash.checkpoint.tensors import Tensors

ARCHITECTURES = {"Qwen3DSparkModel", "DSparkDraftModel"}
HEAD_FIELDS = (
    *("markov_rank", "markov_head_type", "enable_confidence_head"),
    *("confidence_head_with_markov", "confidence_head_alpha"),
)
SECTIONS = ("dflash_config", "dspark_config")


def matches(raw: dict[str, Any]) -> bool:
    """Whether a config.json is of this format."""
    return not ARCHITECTURES.isdisjoint(raw.get("architectures") or ()) or (
        zlab.projector_type(raw) == "dspark"
    )


def read(raw: dict[str, Any], path: str, name: str, tensors: Tensors) -> DFlashConfig:
    """The configuration of a draft of this format. Raises `Refusal` for a wrong or missing field.

    raw: its config.json. path: its folder. name: this format's in `FORMATS`. tensors: the
    checkpoint's, by the model's own names.
    """
    body, method = zlab.read_body(raw, path, name, tensors, HEAD_FIELDS, SECTIONS)
    markov = read_markov(method, default_rank=0)
    trained = method.number("confidence_head_alpha", 0.0) > 0
    return replace(
        body,
        sample_from_anchor=method.boolean("sample_from_anchor", True),
        markov=markov,
        confidence=read_confidence(method, markov, enabled=trained, with_markov=False),
    )


def rename(name: str) -> str:
    """The draft model's name of the checkpoint's tensor `name`."""
    return zlab.rename(name).removeprefix("logit_head.")
