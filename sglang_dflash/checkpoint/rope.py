"""The RoPE of a draft's layers.

A config states it in flat fields (`rope_theta`, `rope_scaling`) or in `rope_parameters` of
Transformers 5, which are one object for all layers or one for each layer type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

from pydantic import Field

from sglang_dflash.checkpoint.config import FULL, SLIDING, Rope
from sglang_dflash.checkpoint.fields import (
    Fields,
    Flag,
    Name,
    Number,
    Place,
    PositiveNumber,
    Unread,
)
from sglang_dflash.errors import shown

NonNegative: TypeAlias = Annotated[Number, Field(ge=0)]


class Common(Fields):
    """Fields of any RoPE. A draft's positions count tokens, so M-RoPE rotates by the same one."""

    rope_type: Name | None = None
    type: Name | None = None  # its older name
    rope_theta: Unread = None  # it may be flat
    partial_rotary_factor: Unread = None
    mrope_section: Unread = None
    mrope_interleaved: Unread = None
    finetuned: Unread = None


class Scaling(Fields):
    """Fields of a type of RoPE. One without a model here is read, and refused as a defect."""

    truncate: Flag | None = None


class Linear(Scaling):
    factor: PositiveNumber


class Llama3(Linear):
    low_freq_factor: PositiveNumber
    high_freq_factor: PositiveNumber
    original_max_position_embeddings: PositiveNumber


class Yarn(Linear):
    original_max_position_embeddings: PositiveNumber | None = None
    attention_factor: NonNegative | None = None
    beta_fast: NonNegative | None = None
    beta_slow: NonNegative | None = None
    mscale: NonNegative | None = None
    mscale_all_dim: NonNegative | None = None


SCALINGS: dict[str, type[Scaling]] = {"linear": Linear, "llama3": Llama3, "yarn": Yarn}
KEYS = set(Common.model_fields).union(*(model.model_fields for model in SCALINGS.values()))


def read_ropes(layers: Place, layer_types: Sequence[str]) -> tuple[Rope, ...]:
    """The RoPE of each layer. Raises `Refusal`.

    layers: the fields of the layers. layer_types: `FULL` or `SLIDING` for each.
    """
    by_type = layers.raw.get("rope_parameters")
    if not isinstance(by_type, dict) or by_type.keys().isdisjoint((FULL, SLIDING)):
        return (_same_rope(layers),) * len(layer_types)
    if layers.raw.get("rope_scaling", by_type) != by_type:
        raise layers.refuse("has a rope_scaling beside rope_parameters of each layer type")
    ropes = {}
    for kind in dict.fromkeys(layer_types):
        if kind not in by_type:
            raise layers.refuse(f"has no rope_parameters for {kind}")
        ropes[kind] = _one_rope(layers, layers.section("rope_parameters").section(kind))
    return tuple(ropes[kind] for kind in layer_types)


def _same_rope(layers: Place) -> Rope:
    """The RoPE of all layers, by `rope_parameters` or `rope_scaling`, which must agree."""
    parameters, scaling = layers.section("rope_parameters"), layers.section("rope_scaling")
    first = parameters if "rope_parameters" in layers.raw else scaling
    rope = _one_rope(layers, first)
    flat = layers.one("rope_theta", PositiveNumber)
    if flat not in (None, rope.theta):
        raise layers.refuse(f"has rope_theta = {flat:g}, but {rope.theta:g} in its RoPE section")
    if "rope_scaling" in layers.raw and _one_rope(layers, scaling, rope.theta) != rope:
        raise layers.refuse(
            f"has rope_scaling = {shown(scaling.raw)}, but rope_parameters = "
            f"{shown(parameters.raw)}"
        )
    return rope


def _one_rope(layers: Place, section: Place, default_theta: float | None = None) -> Rope:
    """The RoPE that a section describes. `rope_theta` may be flat.

    default_theta: of a config that states none.
    """
    place = section if "rope_theta" in section.raw else layers
    theta = place.one("rope_theta", PositiveNumber, default_theta)
    if theta is None or theta <= 1:  # YaRN divides by its logarithm
        raise layers.refuse("has no rope_theta above 1, neither flat nor in rope_parameters")
    section.only({"partial_rotary_factor": 1.0})
    kind = _type_of(section)
    if kind == "default" or kind in SCALINGS:
        section.known(KEYS)
    if kind == "default":
        return Rope(theta)
    scaling = {"rope_type": kind}
    for key in section.read(SCALINGS.get(kind, Scaling)).model_fields_set:
        scaling[key] = section.raw[key]
    if kind == "yarn":  # Transformers' rule: the factor counts from max_position_embeddings
        longest = layers.raw["max_position_embeddings"]
        scaling.setdefault("original_max_position_embeddings", longest)
    return Rope(theta, scaling)


def _type_of(section: Place) -> str:
    """The type of RoPE that a section states, by either name."""
    stated = section.read(Common)
    kind, older = stated.rope_type, stated.type
    # Transformers writes the type "default" beside the older name "mrope" of Qwen's M-RoPE.
    if kind is not None and older not in (None, "mrope", kind):
        raise section.refuse(f"has rope_type = {shown(kind)}, but type = {shown(older)}")
    return kind or older or "default"
