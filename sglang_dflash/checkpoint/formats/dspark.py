"""DSpark checkpoints of DeepSpec and SpecForge: z-lab's fields, and those of the heads.

DeepSpec has all fields at the top level (`Qwen3DSparkModel`), SpecForge those of the method in
`dflash_config` or `dspark_config` (`DSparkDraftModel`). Their drafts predict from the anchor unless
they state otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from sglang_dflash.checkpoint.config import DFlashConfig, Family, Shape
from sglang_dflash.checkpoint.fields import Fields, Flag, Number, Place, Unread, Whole
from sglang_dflash.checkpoint.formats import zlab
from sglang_dflash.checkpoint.tensors import Tensors
from sglang_dflash.errors import shown

ARCHITECTURES = {"Qwen3DSparkModel", "DSparkDraftModel"}
SECTIONS = ("dflash_config", "dspark_config")
MARKOV_KINDS = ("vanilla", "gated", "rnn")


class Heads(Fields):
    """Fields beside z-lab's. The defaults are those of DeepSpec and SpecForge."""

    sample_from_anchor: Flag = True
    markov_rank: Whole = 0
    markov_head_type: Unread = None  # one of MARKOV_KINDS, if the rank is not 0
    enable_confidence_head: Flag | None = None  # by default, it is there if it has a loss
    confidence_head_alpha: Number = 0.0  # weight of that loss
    confidence_head_with_markov: Unread = False  # a flag, if there is such a head


@dataclass(frozen=True)
class Markov:
    """A head that adds a low-rank bias to each position's logits, by the token before."""

    kind: str  # one of MARKOV_KINDS
    rank: int


@dataclass(frozen=True)
class Confidence:
    """A head that predicts the probability of each draft's acceptance."""

    with_markov: bool  # its input is [hidden; markov_w1[previous token]], else the hidden state


@dataclass(frozen=True)
class DSpark(Family):
    name: ClassVar[str] = "DSpark"
    module: ClassVar[str] = "dspark"

    markov: Markov | None
    confidence: Confidence | None

    @property
    def confidence_rank(self) -> int:
        """Values of the Markov head's row that the confidence head reads."""
        reads = self.confidence is not None and self.confidence.with_markov
        return self.markov.rank if reads and self.markov is not None else 0

    def shapes(self, draft: DFlashConfig) -> dict[str, Shape]:
        hidden = draft.hidden_size
        shapes: dict[str, Shape] = {}
        if self.markov is not None:
            rank = self.markov.rank
            shapes["markov_head.markov_w1.weight"] = (draft.vocab_size, rank)
            shapes["markov_head.markov_w2.weight"] = (draft.columns, rank)
            if self.markov.kind == "gated":
                shapes["markov_head.gate_proj.weight"] = (rank, hidden + rank)
                shapes["markov_head.gate_proj.bias"] = (rank,)
            elif self.markov.kind == "rnn":
                shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
                shapes["markov_head.joint_proj.bias"] = (3 * rank,)
        if self.confidence is not None:
            shapes["confidence_head.proj.weight"] = (1, hidden + self.confidence_rank)
            shapes["confidence_head.proj.bias"] = (1,)
        return shapes

    def parts(self) -> list[str]:
        parts = []
        if self.markov is not None:
            parts.append(f"Markov ({self.markov.kind}, rank {self.markov.rank})")
        if self.confidence is not None:
            parts.append("confidence")
        return parts


def matches(raw: dict[str, Any]) -> bool:
    """Whether a config.json is of this format."""
    return not ARCHITECTURES.isdisjoint(raw.get("architectures") or ()) or (
        zlab.projector_type(raw) == "dspark"
    )


def read(raw: dict[str, Any], path: str, name: str, tensors: Tensors) -> DFlashConfig:
    """The configuration of a draft of this format. Raises `Refusal`, which names the field."""
    body, method = zlab.read_body(raw, path, name, tensors, Heads, SECTIONS)
    heads = method.read(Heads)
    family = read_heads(method, heads)
    return replace(body, sample_from_anchor=heads.sample_from_anchor, family=family)


def read_heads(place: Place, heads: Heads) -> Family:
    """The heads of a DSpark draft. Without any, it is a DFlash draft. Raises `Refusal`.

    place: of the fields `heads`.
    """
    markov = _markov(place, heads)
    enabled = heads.enable_confidence_head
    if enabled is None:
        enabled = heads.confidence_head_alpha > 0
    confidence = _confidence(place, heads, markov) if enabled else None
    if markov is None and confidence is None:
        return Family()
    return DSpark(markov, confidence)


def _markov(place: Place, heads: Heads) -> Markov | None:
    """The Markov head. None for rank 0: each position is then predicted by itself."""
    if heads.markov_rank == 0:
        return None
    kind = heads.markov_head_type or "vanilla"
    if kind not in MARKOV_KINDS:
        raise place.refuse(
            f"has markov_head_type = {shown(kind)}, which must be one of {', '.join(MARKOV_KINDS)}"
        )
    return Markov(kind, heads.markov_rank)


def _confidence(place: Place, heads: Heads, markov: Markov | None) -> Confidence:
    default = heads.confidence_head_with_markov
    with_markov = place.one("confidence_head_with_markov", Flag, default)
    if with_markov and markov is None:
        raise place.refuse(
            "has markov_rank 0, and a confidence head that reads the Markov head",
            "State enable_confidence_head or confidence_head_with_markov as false.",
        )
    return Confidence(with_markov)


def rename(name: str) -> str:
    """The draft model's name of the checkpoint's tensor `name`."""
    return zlab.rename(name).removeprefix("logit_head.")
