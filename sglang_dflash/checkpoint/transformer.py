"""What every format states alike: the layers of a draft, as Transformers' `Qwen3Config` does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from sglang_dflash.checkpoint.config import FULL, SLIDING
from sglang_dflash.checkpoint.fields import (
    Fields,
    Flag,
    NumLayers,
    Place,
    Positive,
    PositiveNumber,
    Unread,
    Whole,
)
from sglang_dflash.checkpoint.rope import read_ropes
from sglang_dflash.checkpoint.tensors import Tensors
from sglang_dflash.errors import shown

FIRST_SLIDING_LAYER = 28  # Transformers' default of max_window_layers
LayerType: TypeAlias = Literal["full_attention", "sliding_attention"]


class Body(Fields):
    """Fields of the layers, and of what surrounds them."""

    hidden_size: Positive
    intermediate_size: Positive
    num_hidden_layers: NumLayers
    num_attention_heads: Positive
    num_key_value_heads: Positive | None = None
    head_dim: Positive | None = None
    vocab_size: Positive
    max_position_embeddings: Positive
    rms_norm_eps: PositiveNumber = 1e-6
    attention_bias: Flag = False
    hidden_act: Literal["silu"] = "silu"
    layer_types: Annotated[list[LayerType], Field(fail_fast=True)] | None = None
    sliding_window: Positive | None = None
    use_sliding_window: Flag | None = None
    max_window_layers: Unread = None  # read where layer_types is absent
    rope_theta: Unread = None  # `rope.py` reads these
    rope_scaling: Unread = None
    rope_parameters: Unread = None

    @property
    def window(self) -> int | None:
        """The length of a sliding window. None if there is none, or if it is switched off."""
        return None if self.use_sliding_window is False else self.sliding_window


class Direction(Fields):
    """Whether all layers are causal in the block, by the names that trainers give to it."""

    causal: Flag | None = None  # ModelOpt, vLLM and NeMo Automodel
    is_causal: Flag | None = None  # z-lab and SpecForge
    causal_head: Flag | None = None  # JetSpec


def read_layer_types(place: Place, body: Body) -> list[str]:
    """The type of each layer. Raises `Refusal`.

    place: of the layers, whose fields are `body`. Transformers' rule replaces an absent list: if
    windows are switched on, layers slide from `max_window_layers` on.
    """
    count = body.num_hidden_layers
    if body.layer_types is None:
        first = place.one("max_window_layers", Whole, FIRST_SLIDING_LAYER)
        slides = body.use_sliding_window and body.sliding_window
        return [SLIDING if slides and layer >= first else FULL for layer in range(count)]
    if len(body.layer_types) != count:
        raise place.refuse(
            f"has layer_types = {shown(body.layer_types)}, which must name {count} layers"
        )
    return list(body.layer_types)


def read_direction(top: Place, sections: Iterable[Place]) -> bool | None:
    """Whether all layers are causal in the block, by any of the keys in `Direction`.

    sections: of the file `top`. None: none of them states it. Raises `Refusal` if two keys differ.
    """
    stated = []
    for place in (top, *sections):
        where = f" in its {place.section_name}" if place.section_name else ""
        for key, value in place.read(Direction):
            if value is not None:
                stated.append((value, f"{key} = {value}{where}"))
    for value, words in stated:
        if value != stated[0][0]:
            raise top.refuse(f"has {stated[0][1]}, but {words}")
    return stated[0][0] if stated else None


def layers_of(place: Place, key: str, ids: list[int], embedding: int) -> tuple[int, ...]:
    """The target layers whose outputs these ids are, from 0 on. Raises `Refusal`.

    place, key: where the ids are stated. embedding: the id of the embedding's output, which the
    first layer's follows.
    """
    if ids[0] <= embedding:
        raise place.refuse(
            f"has {key} = {shown(ids)}, where {embedding} is the output of the embedding, which "
            "SGLang's models do not return",
            "Use a draft that reads outputs of layers only.",
        )
    return tuple(i - embedding - 1 for i in ids)


def in_common(place: Place, body: Body, layer_types: list[str], tensors: Tensors) -> dict[str, Any]:
    """The arguments of `DFlashConfig` that every format reads alike. Raises `Refusal`.

    place: of the layers, whose fields are `body`. layer_types: of each layer. tensors: the
    checkpoint's, by the model's own names.
    """
    heads = body.num_attention_heads
    return {
        "hidden_size": body.hidden_size,
        "intermediate_size": body.intermediate_size,
        "num_layers": body.num_hidden_layers,
        "num_heads": heads,
        "num_kv_heads": body.num_key_value_heads or heads,
        "head_dim": body.head_dim or body.hidden_size // heads,
        "vocab_size": body.vocab_size,
        "rms_norm_eps": body.rms_norm_eps,
        "attention_bias": body.attention_bias,
        "max_position_embeddings": body.max_position_embeddings,
        "rope": read_ropes(place, layer_types),
        "own_embedding": "embed_tokens.weight" in tensors,
        "draft_vocab_size": tensors.rows("lm_head.weight"),
        "mask_embedding": tensors.has_mask_embedding(),
    }
