"""DFlash 2 checkpoints of z-lab: the fields of its DFlash drafts, and those of two parts more.

`conv_kernel_size` and `conv_group_size` describe convolutions in every layer, `selector_rank` and
`selector_top_k` a candidate selector. They are in `dflash_config` or at the top level.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from sglang_dflash.checkpoint.config import DFlashConfig, Family, Shape
from sglang_dflash.checkpoint.fields import Fields
from sglang_dflash.checkpoint.formats import zlab
from sglang_dflash.checkpoint.tensors import Tensors

HEAD_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
# z-lab publishes codebooks without `.weight`. Its own class saves them with it.
CODEBOOK = re.compile(r"(candidate_selector\.\w+_codebook)\.weight")

# Of a position. Published selectors have 16, and each is a row of a codebook.
MOST_CANDIDATES = 1024


@dataclass(frozen=True)
class Convolution:
    """Causal convolutions along the block, around both sublayers of every layer."""

    taps: int  # positions that one reads: the position itself and those before it
    group: int  # channels that share what a kernel gets from the hidden state


@dataclass(frozen=True)
class Selector:
    """A head that picks each draft among the likeliest tokens, by the draft before."""

    rank: int
    top_k: int  # candidates of a position


@dataclass(frozen=True)
class DFlash2(Family):
    name: ClassVar[str] = "DFlash 2"
    module: ClassVar[str] = "dflash2"

    convolution: Convolution | None
    selector: Selector | None

    def shapes(self, draft: DFlashConfig) -> dict[str, Shape]:
        if self.selector is None:
            return {}
        rank, codebook = self.selector.rank, (draft.vocab_size, self.selector.rank)
        return {
            "candidate_selector.predecessor_codebook": codebook,
            "candidate_selector.successor_codebook": codebook,
            "candidate_selector.hidden_projection.weight": (rank, draft.hidden_size),
        }

    def shapes_in_layer(self, draft: DFlashConfig) -> dict[str, Shape]:
        if self.convolution is None:
            return {}
        hidden, taps = draft.hidden_size, self.convolution.taps
        outputs = 2 * taps * (hidden // self.convolution.group)
        shapes: dict[str, Shape] = {}
        for name in ("attention_conv", "mlp_conv"):
            shapes[f"{name}.base_kernel"] = (2, taps, hidden)
            shapes[f"{name}.kernel_projection.weight"] = (outputs, hidden)
        return shapes

    def parts(self) -> list[str]:
        parts = []
        if self.convolution is not None:
            parts.append(f"convolutions ({self.convolution.taps} taps)")
        if self.selector is not None:
            parts.append(f"selector ({self.selector.top_k} candidates)")
        return parts


def matches(raw: dict[str, Any]) -> bool:
    """Whether a config.json is of this format."""
    is_dflash = zlab.projector_type(raw) in (None, "dflash")
    return is_dflash and "DFlash2DraftModel" in (raw.get("architectures") or ())


def read(raw: dict[str, Any], path: str, name: str, tensors: Tensors) -> DFlashConfig:
    """The configuration of a draft of this format. Raises `Refusal` for a wrong or missing field.

    raw: its config.json. path: its folder. name: this format's in `FORMATS`. tensors: the
    checkpoint's, by the model's own names.
    """
    body, method = zlab.read_body(raw, path, name, tensors, HEAD_FIELDS)
    family = read_parts(method, body)
    if family.convolution is None and family.selector is None:
        raise method.refuse(
            "has neither conv_kernel_size nor selector_rank, and a DFlash 2 draft has one of them"
        )
    return replace(body, family=family)


def read_parts(fields: Fields, body: DFlashConfig) -> DFlash2:
    """The parts of a DFlash 2 draft. Raises `Refusal`."""
    return DFlash2(
        _read_convolution(fields, body.hidden_size, body.draft_width),
        _read_selector(fields, body.vocab_size),
    )


def _read_convolution(fields: Fields, hidden_size: int, draft_width: int) -> Convolution | None:
    """hidden_size, draft_width: the draft's. speculators refuses more taps than positions, too."""
    stated = _pair(fields, "conv_kernel_size", "conv_group_size")
    if stated is None:
        return None
    taps, group = stated
    if hidden_size % group:
        raise fields.refuse(
            f"has conv_group_size = {group}, which does not divide hidden_size = {hidden_size}"
        )
    if taps > draft_width:
        raise fields.refuse(
            f"has conv_kernel_size = {taps}, which is more than block_size = {draft_width}"
        )
    return Convolution(taps, group)


def _read_selector(fields: Fields, vocab_size: int) -> Selector | None:
    """vocab_size: the target's."""
    stated = _pair(fields, "selector_rank", "selector_top_k")
    if stated is None:
        return None
    rank, top_k = stated
    if top_k > MOST_CANDIDATES:
        raise fields.refuse(
            f"has selector_top_k = {top_k}, which must be at most {MOST_CANDIDATES}"
        )
    if top_k > vocab_size:
        raise fields.refuse(
            f"has selector_top_k = {top_k}, which is more than vocab_size = {vocab_size}"
        )
    return Selector(rank, top_k)


def _pair(fields: Fields, one: str, other: str) -> tuple[int, int] | None:
    """Two positive integers, or None if both are absent."""
    first, second = fields.optional_positive(one), fields.optional_positive(other)
    if first is None and second is None:
        return None
    if first is None or second is None:
        stated, absent = (other, one) if first is None else (one, other)
        raise fields.refuse(f"has {stated} but no {absent}")
    return first, second


def rename(name: str) -> str:
    """The draft model's name of the checkpoint's tensor `name`."""
    return CODEBOOK.sub(r"\1", zlab.rename(name))
