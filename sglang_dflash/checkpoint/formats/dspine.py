"""DSpine checkpoints: those of SpecForge, and those that Tencent's own training writes.

SpecForge's have z-lab's fields, and those of the injection in `dspine_config`. Tencent's have their
config in `config`, and the codes of the tokens in a file of their own, transfer.safetensors. These
are read as SpecForge's converter does: a block has 16 positions and 16 candidates for each, all
layers see the whole context, and the other sizes are those of the tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from sglang_dflash.checkpoint.config import FULL, DFlashConfig, Family, Shape
from sglang_dflash.checkpoint.fields import (
    Fields,
    LayerIds,
    NumLayers,
    Object,
    Place,
    Positive,
    Unread,
    Whole,
)
from sglang_dflash.checkpoint.formats import zlab
from sglang_dflash.checkpoint.tensors import Tensors
from sglang_dflash.checkpoint.transformer import read_direction

CODES = "transfer_codes"
NESTED = "config"  # the key of Tencent's form
OF_TENCENT = 16  # positions of a block, and candidates of each
MOST_CANDIDATES = 64  # of a position; each is refined behind each of the position before


class Sections(Fields):
    """Fields beside z-lab's."""

    dspine_config: Object


class Sizes(Fields):
    """Fields of `dspine_config`. The later ones are of training."""

    transfer_rank: Positive
    message_size: Positive
    top_k: Annotated[int, Field(ge=1, le=MOST_CANDIDATES)]
    ce_weight: Unread = None
    alignment_weight: Unread = None
    alignment_warmup_steps: Unread = None
    replacement_layers: Unread = None
    replacement_probability: Unread = None
    replacement_hold_ratio: Unread = None
    replacement_end_ratio: Unread = None
    candidate_mass_threshold: Unread = None


class Needed(Fields):
    """Fields of Tencent's `dflash_config` that have no default there."""

    mask_token_id: Whole
    target_layer_ids: LayerIds


@dataclass(frozen=True)
class DSpine(Family):
    """Each position learns after every layer from the one before it, the last time from a token."""

    name: ClassVar[str] = "DSpine"
    module: ClassVar[str] = "dspine"
    marks: ClassVar[tuple[str, ...]] = ("transfer_ready",)
    reads_head: ClassVar[bool] = True

    rank: int  # of what a position tells, and of a token's code
    message_size: int
    top_k: int  # candidates of a position

    def shapes(self, draft: DFlashConfig) -> dict[str, Shape]:
        hidden, rank, message = draft.hidden_size, self.rank, self.message_size
        shapes: dict[str, Shape] = {"injection.bias": (message,), CODES: (draft.vocab_size, rank)}
        for name in ("message", "receiver_gate", "predecessor_gate"):
            shapes[f"injection.{name}.weight"] = (message, rank)
        for layer in range(draft.num_layers):
            shapes[f"injection.readouts.{layer}.weight"] = (rank, hidden)
            shapes[f"injection.writes.{layer}.weight"] = (hidden, message)
        return shapes

    def parts(self) -> list[str]:
        sizes = f"rank {self.rank}, messages of {self.message_size}"
        return [f"injection ({sizes})", f"refined edges ({self.top_k} candidates)"]


def matches(raw: dict[str, Any]) -> bool:
    """Whether a config.json is of this format."""
    architectures = raw.get("architectures") or ()
    nested = not architectures and isinstance(raw.get(NESTED), dict)
    return nested or "dspine_config" in raw or "DSpineDraftModel" in architectures


def read(raw: dict[str, Any], path: str, name: str, tensors: Tensors) -> DFlashConfig:
    """The configuration of a draft of this format. Raises `Refusal`, which names the field."""
    if not raw.get("architectures") and NESTED in raw:
        raw = _of_tencent(Place(raw, f"{path}/config.json").section(NESTED), tensors)
    body, method = zlab.read_body(raw, path, name, tensors, Sections)
    place = Place(method.read(Sections).dspine_config, method.file, "dspine_config")
    place.known(Sizes.model_fields)
    sizes = place.read(Sizes)
    top = Place(raw, method.file)
    if read_direction(top, [top.section("dflash_config")]) is False:
        raise top.refuse("says that blocks are not causal, and those of a DSpine draft are")
    if body.sample_from_anchor:
        raise top.refuse(
            "has sample_from_anchor, and the anchor of a DSpine draft predicts nothing"
        )
    for key, value, bound in (
        ("transfer_rank", sizes.transfer_rank, "hidden_size"),
        ("top_k", sizes.top_k, "vocab_size"),
    ):
        if value > getattr(body, bound):
            raise place.refuse(
                f"has {key} = {value}, which is more than {bound} = {getattr(body, bound)}"
            )
    if body.draft_vocab_size not in (None, body.vocab_size):
        raise top.refuse("has a smaller vocabulary than its target, which a DSpine draft cannot")
    causal = tuple(replace(view, causal=True) for view in body.attention)
    family = DSpine(sizes.transfer_rank, sizes.message_size, sizes.top_k)
    return replace(body, attention=causal, family=family)


def _of_tencent(nested: Place, tensors: Tensors) -> dict[str, Any]:
    """The config of Tencent's form as SpecForge writes it. Raises `Refusal`."""
    method = nested.section("dflash_config")
    method.read(Needed)
    layers = nested.one("num_hidden_layers", NumLayers)
    if layers is None:
        raise nested.refuse("has no num_hidden_layers")
    named = CODES, "injection.readouts.0.weight", "injection.message.weight"
    _, rank, message = rows = [tensors.rows(name) for name in named]
    if None in rows:
        raise nested.refuse(
            "is where Tencent's training of DSpine drafts puts it, but the folder holds no tensor "
            f"{named[rows.index(None)]} (codes are in transfer.safetensors)"
        )
    return nested.raw | {
        "block_size": OF_TENCENT,
        "layer_types": [FULL] * layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "dflash_config": method.raw,
        "dspine_config": {"transfer_rank": rank, "message_size": message, "top_k": OF_TENCENT},
    }


def rename(name: str) -> str:
    """The draft model's name of the checkpoint's tensor `name`."""
    return CODES if name == "codes" else zlab.rename(name)
