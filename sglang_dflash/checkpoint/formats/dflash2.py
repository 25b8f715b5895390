"""DFlash 2 checkpoints of z-lab: the fields of its DFlash drafts, and those of two parts more.

`conv_kernel_size` and `conv_group_size` describe convolutions in every layer, `selector_rank` and
`selector_top_k` a candidate selector. They are in `dflash_config` or at the top level.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import Field

from sglang_dflash.checkpoint.config import DFlashConfig, Family, Shape
from sglang_dflash.checkpoint.fields import Fields, Place, Positive
from sglang_dflash.checkpoint.formats import zlab
from sglang_dflash.checkpoint.tensors import Tensors

# z-lab publishes codebooks without `.weight`. Its own class saves them with it.
CODEBOOK = re.compile(r"(candidate_selector\.\w+_codebook)\.weight")

# Of a position. Published selectors have 16, and each is a row of a codebook.
MOST_CANDIDATES = 1024
NumCandidates: TypeAlias = Annotated[int, Field(ge=1, le=MOST_CANDIDATES)]


class Convolutions(Fields):
    """Fields of the convolutions."""

    conv_kernel_size: Positive | None = None
    conv_group_size: Positive | None = None


class Parts(Convolutions):
    """Fields beside z-lab's."""

    selector_rank: Positive | None = None
    selector_top_k: NumCandidates | None = None


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
    """The configuration of a draft of this format. Raises `Refusal`, which names the field."""
    body, method = zlab.read_body(raw, path, name, tensors, Parts)
    family = read_parts(method, method.read(Parts), body)
    if family.convolution is None and family.selector is None:
        raise method.refuse(
            "has neither conv_kernel_size nor selector_rank, and a DFlash 2 draft has one of them"
        )
    return replace(body, family=family)


def read_parts(place: Place, parts: Parts, body: DFlashConfig) -> DFlash2:
    """The parts of a DFlash 2 draft. Raises `Refusal`.

    place: of the fields `parts`. body: the draft without them.
    """
    return DFlash2(read_convolution(place, parts, body), _selector(place, parts, body))


def read_convolution(place: Place, parts: Convolutions, body: DFlashConfig) -> Convolution | None:
    """The convolutions of a draft, if it has some. Raises `Refusal`, as `read_parts`."""
    taps, group = parts.conv_kernel_size, parts.conv_group_size
    if taps is None or group is None:
        _neither(place, parts, "conv_kernel_size", "conv_group_size")
        return None
    if body.hidden_size % group:
        raise place.refuse(
            f"has conv_group_size = {group}, which does not divide hidden_size = {body.hidden_size}"
        )
    if taps > body.draft_width:  # speculators refuses it, too
        raise place.refuse(
            f"has conv_kernel_size = {taps}, which is more than block_size = {body.draft_width}"
        )
    return Convolution(taps, group)


def _selector(place: Place, parts: Parts, body: DFlashConfig) -> Selector | None:
    rank, top_k = parts.selector_rank, parts.selector_top_k
    if rank is None or top_k is None:
        _neither(place, parts, "selector_rank", "selector_top_k")
        return None
    if top_k > body.vocab_size:
        raise place.refuse(
            f"has selector_top_k = {top_k}, which is more than vocab_size = {body.vocab_size}"
        )
    return Selector(rank, top_k)


def _neither(place: Place, parts: Fields, one: str, other: str) -> None:
    """Raise `Refusal` if one of two fields is stated, of which there are both or none."""
    for stated, absent in ((one, other), (other, one)):
        if getattr(parts, stated) is not None:
            raise place.refuse(f"has {stated} but no {absent}")


def rename(name: str) -> str:
    """The draft model's name of the checkpoint's tensor `name`."""
    return CODEBOOK.sub(r"\1", zlab.rename(name))
