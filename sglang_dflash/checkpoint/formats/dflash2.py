"""DFlash 2 checkpoints of z-lab: the fields of its DFlash drafts, and those of two parts more.

`conv_kernel_size` and `conv_group_size` describe convolutions in every layer, `selector_rank` and
`selector_top_k` a candidate selector. They are in `dflash_config` or at the top level.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.checkpoint.formats import zlab
from sglang_dflash.checkpoint.heads import read_convolution, read_selector
from sglang_dflash.checkpoint.tensors import Tensors

HEAD_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
# z-lab publishes codebooks without `.weight`. Its own class saves them with it.
CODEBOOK = re.compile(r"(candidate_selector\.\w+_codebook)\.weight")


def matches(raw: dict[str, Any]) -> bool:
    """Whether a config.json is of this format."""
    return "DFlash2DraftModel" in (raw.get("architectures") or ())


def read(raw: dict[str, Any], path: str, name: str, tensors: Tensors) -> DFlashConfig:
    """The configuration of a draft of this format. Raises `Refusal` for a wrong or missing field.

    raw: its config.json. path: its folder. name: this format's in `FORMATS`. tensors: the
    checkpoint's, by the model's own names.
    """
    body, method = zlab.read_body(raw, path, name, tensors, HEAD_FIELDS)
    convolution = read_convolution(method, body.hidden_size, body.draft_width)
    selector = read_selector(method, body.vocab_size)
    if convolution is None and selector is None:
        raise method.refuse(
            "has neither conv_kernel_size nor selector_rank, and a DFlash 2 draft has one of them"
        )
    return replace(body, convolution=convolution, selector=selector)


def rename(name: str) -> str:
    """The draft model's name of the checkpoint's tensor `name`."""
    return CODEBOOK.sub(r"\1", zlab.rename(name))
