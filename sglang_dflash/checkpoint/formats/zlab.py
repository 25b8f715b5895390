"""z-lab checkpoints and SpecForge exports: `DFlashDraftModel`, method fields in `dflash_config`.

NeMo Automodel writes the same format with a class of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from sglang_dflash.checkpoint import transformer
from sglang_dflash.checkpoint.config import SLIDING, DFlashConfig, LayerAttention
from sglang_dflash.checkpoint.fields import (
    Fields,
    Flag,
    LayerIds,
    NumLayers,
    NumPositions,
    Place,
    Positive,
    PositiveNumber,
    Quantization,
    Unread,
    Whole,
)
from sglang_dflash.checkpoint.known_keys import BOOKKEEPING, OF_OTHER_LAYERS, OF_TARGETS, TRAINING
from sglang_dflash.checkpoint.tensors import Tensors
from sglang_dflash.errors import shown

ARCHITECTURES = {"DFlashDraftModel", "Qwen3DFlashDraftModel"}


class Top(transformer.Body):
    """Fields that are at the top level only."""

    draft_vocab_size: Positive | None = None
    quantization_config: Quantization | None = None
    target_hidden_size: Positive | None = None


class Method(Fields):
    """Fields in `dflash_config` or at the top level, which must agree if they are in both."""

    block_size: NumPositions
    mask_token_id: Whole
    mask_token: Unread = None  # the text of the mask, which its id stands for
    target_layer_ids: LayerIds | None = None
    num_target_layers: NumLayers | None = None
    sample_from_anchor: Flag = False
    projector_type: Unread = None  # `matches` of the formats read it
    attention_mode: Literal["mha", "gqa"] | None = None
    use_swa: Flag = False
    swa_window_size: Positive | None = None
    input_embedding_scale: PositiveNumber | None = None
    output_multiplier: PositiveNumber = 1.0
    final_logit_softcapping: PositiveNumber | None = None


def projector_type(raw: dict[str, Any]) -> Any:
    """The kind of draft that a config states, in `dflash_config` or at the top level."""
    method = raw.get("dflash_config") or {}
    return method.get("projector_type") or raw.get("projector_type")


def matches(raw: dict[str, Any]) -> bool:
    """Whether a config.json is of this format."""
    return not ARCHITECTURES.isdisjoint(raw.get("architectures") or ())


def default_target_layer_ids(num_target_layers: int, count: int) -> list[int]:
    """z-lab's rule for checkpoints that name no target layers: spread over layers 1 .. L-3.

    num_target_layers: L. count: layers of the draft, and length of the result.
    """
    if count == 1:
        return [num_target_layers // 2]
    return [round(1 + i * (num_target_layers - 4) / (count - 1)) for i in range(count)]


def read(raw: dict[str, Any], path: str, name: str, tensors: Tensors) -> DFlashConfig:
    """The configuration of a draft of this format. Raises `Refusal`, which names the field."""
    return read_body(raw, path, name, tensors)[0]


def read_body(
    raw: dict[str, Any],
    path: str,
    name: str,
    tensors: Tensors,
    head: type[Fields] = Fields,
    names: tuple[str, ...] = ("dflash_config",),
) -> tuple[DFlashConfig, Place]:
    """The configuration without a head, and the fields of `Method` and `head` by their keys.

    head: the fields that a family has beside them. names: of the sections that hold such fields.
    """
    top = Place(raw, f"{path}/config.json")
    sections = [top.section(section) for section in names]
    keys = {**Method.model_fields, **head.model_fields}
    stated = _agreed(top, sections, keys)
    body, method = top.read(Top), stated.read(Method)
    _check_keys(top, sections, keys)
    _check_vocabulary(top, body, tensors)
    layer_types = transformer.read_layer_types(top, body)
    causal = transformer.read_direction(top, sections)
    config = DFlashConfig(
        path=path,
        format=name,
        draft_width=method.block_size,
        sample_from_anchor=method.sample_from_anchor,
        mask_token_id=method.mask_token_id,
        target_layer_ids=_target_layer_ids(top, method, body.num_hidden_layers),
        num_target_layers=method.num_target_layers,
        target_hidden_size=body.target_hidden_size or body.hidden_size,
        attention=_attention(top, body, method, causal, layer_types),
        embedding_scale=method.input_embedding_scale,
        quantization=body.quantization_config,
        logit_multiplier=method.output_multiplier,
        logit_cap=method.final_logit_softcapping,
        **transformer.in_common(top, body, layer_types, tensors),
    )
    return config, stated


def _agreed(top: Place, sections: Iterable[Place], keys: Iterable[str]) -> Place:
    """The fields `keys`, each from the place that states it. Two places must state the same."""
    stated: dict[str, Any] = {}
    for key in keys:
        for place in (top, *sections):
            value = place.raw.get(key)
            if value is None:
                continue
            if key in stated and stated[key] != value:
                raise top.refuse(
                    f"has {key} = {shown(stated[key])}, but {shown(value)} in its "
                    f"{place.section_name}"
                )
            stated[key] = value
    return Place(stated, top.file)


def _check_keys(top: Place, sections: Iterable[Place], keys: Iterable[str]) -> None:
    """Raise `Refusal` for a key that is not known, or a value that other layers have.

    keys: those that may be in either place.
    """
    direction = transformer.Direction.model_fields
    either = (*keys, *direction, *TRAINING, *OF_OTHER_LAYERS, "target_hidden_size")
    names = []
    for section in sections:
        section.only(OF_OTHER_LAYERS)
        # If the target's differs, JetSpec has an adapter, which is not served.
        section.only({"target_hidden_size": top.raw["hidden_size"]})
        section.known(either)
        names.append(section.section_name)
    top.only(OF_OTHER_LAYERS)
    top.known(either, names, Top.model_fields, OF_TARGETS, BOOKKEEPING)


def _check_vocabulary(top: Place, body: Top, tensors: Tensors) -> None:
    """Raise `Refusal` if the config states another vocabulary than the LM head has."""
    rows = tensors.rows("lm_head.weight") or body.vocab_size
    if tensors.known and body.draft_vocab_size not in (None, rows):
        raise top.refuse(
            f"has draft_vocab_size = {body.draft_vocab_size} of {body.vocab_size} but no "
            "lm_head.weight of so many rows"
        )


def _target_layer_ids(top: Place, method: Method, num_layers: int) -> tuple[int, ...]:
    if method.target_layer_ids is not None:
        return transformer.layers_of(top, "target_layer_ids", method.target_layer_ids, embedding=-1)
    if method.num_target_layers is None:
        raise top.refuse(
            "names neither target_layer_ids nor num_target_layers, so the target layers that the "
            "draft was trained on are unknown",
            "Add dflash_config.target_layer_ids.",
        )
    ids = default_target_layer_ids(method.num_target_layers, num_layers)
    if ids[-1] < ids[0] or ids[0] < 0:
        raise top.refuse(f"has num_target_layers = {method.num_target_layers}, which are too few")
    return tuple(ids)


def _attention(
    top: Place, body: transformer.Body, method: Method, causal: bool | None, layer_types: list[str]
) -> tuple[LayerAttention, ...]:
    """The attention of each layer, by the rules of z-lab's reference.

    Each position of a sliding layer sees the last `sliding_window` tokens, itself included.
    `use_swa` makes every layer slide. causal: of every layer, if the config states it. Else sliding
    layers are causal and the others are not.
    """
    if method.use_swa:
        layer_types = [SLIDING] * len(layer_types)
    window, other = method.swa_window_size, body.window
    if None not in (window, other) and window != other:
        raise top.refuse(f"has swa_window_size = {window}, but sliding_window = {other}")
    window = window or other
    if SLIDING in layer_types and window is None and body.use_sliding_window is not False:
        raise top.refuse("has sliding_attention layers but no sliding_window")
    slides = LayerAttention(causal=causal is not False, window=window)
    full = LayerAttention(causal=bool(causal))
    return tuple(slides if kind == SLIDING else full for kind in layer_types)


def rename(name: str) -> str:
    """The draft model's name of the checkpoint's tensor `name`."""
    return name.removeprefix("model.")
