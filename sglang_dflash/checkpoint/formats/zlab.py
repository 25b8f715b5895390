"""z-lab checkpoints and SpecForge exports: `DFlashDraftModel`, method fields in `dflash_config`.

NeMo Automodel writes the same format with a class of its own.
"""

from __future__ import annotations

from typing import Any

from sglang_dflash.checkpoint.config import DFlashConfig, LayerAttention
from sglang_dflash.checkpoint.fields import (
    FULL,
    MOST_LAYERS,
    MOST_POSITIONS,
    SLIDING,
    Fields,
)
from sglang_dflash.checkpoint.known_keys import (
    BODY,
    BOOKKEEPING,
    DIRECTION,
    OF_OTHER_LAYERS,
    OF_TARGETS,
    TRAINING,
)
from sglang_dflash.checkpoint.tensors import Tensors

TOP = ("draft_vocab_size", "quantization_config")  # at the top level only
ARCHITECTURES = {"DFlashDraftModel", "Qwen3DFlashDraftModel"}
# Fields that are in `dflash_config` or at the top level, and that must agree if they are in both.
METHOD = (
    *("block_size", "mask_token_id", "target_layer_ids", "num_target_layers"),
    *("sample_from_anchor", "projector_type", "attention_mode", "use_swa", "swa_window_size"),
    *("input_embedding_scale", "output_multiplier", "final_logit_softcapping"),
    "mask_token",  # the text of the mask, which its id stands for
)


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
    """The configuration of a draft of this format. Raises `Refusal` for a wrong or missing field.

    raw: its config.json. path: its folder. name: this format's in `FORMATS`. tensors: the
    checkpoint's, by the model's own names.
    """
    return read_body(raw, path, name, tensors)[0]


def read_body(
    raw: dict[str, Any],
    path: str,
    name: str,
    tensors: Tensors,
    heads: tuple[str, ...] = (),
    names: tuple[str, ...] = ("dflash_config",),
) -> tuple[DFlashConfig, Fields]:
    """The configuration without heads, and the fields of the method, in `METHOD` and `heads`.

    heads: fields that a family has beside them. names: of the sections that hold such fields.
    """
    top = Fields(raw, f"{path}/config.json")
    sections = [top.section(section) for section in names]
    method = top.agreed(sections, (*METHOD, *heads))
    num_layers = top.positive("num_hidden_layers", MOST_LAYERS)
    num_target_layers = method.optional_positive("num_target_layers", MOST_LAYERS)
    ids = method.optional_layer_ids("target_layer_ids", embedding=-1)
    if ids is None and num_target_layers is not None:
        ids = default_target_layer_ids(num_target_layers, num_layers)
        if ids[-1] < ids[0] or ids[0] < 0:
            raise top.refuse(f"has num_target_layers = {num_target_layers}, which are too few")
    if ids is None:
        raise top.refuse(
            "names neither target_layer_ids nor num_target_layers, so the target layers that the "
            "draft was trained on are unknown",
            "Add dflash_config.target_layer_ids.",
        )
    mask = method.optional_int("mask_token_id")
    if mask is None:
        raise top.refuse("has no mask_token_id", "Add dflash_config.mask_token_id.")
    draft_width = method.optional_positive("block_size", MOST_POSITIONS)
    if draft_width is None:
        raise top.refuse("has no block_size", "Add the block size that the draft was trained with.")
    top.must_be("hidden_act", "silu")
    method.must_be("attention_mode", "mha", "gqa")
    hidden_size, heads_of_layer = top.positive("hidden_size"), top.positive("num_attention_heads")
    vocab_size = top.positive("vocab_size")
    rows = tensors.rows("lm_head.weight")
    draft_vocab_size = top.optional_positive("draft_vocab_size")
    if tensors.known and draft_vocab_size not in (None, rows or vocab_size):
        raise top.refuse(
            f"has draft_vocab_size = {draft_vocab_size} of {vocab_size} but no lm_head.weight of "
            "so many rows"
        )
    in_either = (*METHOD, *heads, *DIRECTION, *TRAINING, *OF_OTHER_LAYERS, "target_hidden_size")
    for section in sections:
        section.only(OF_OTHER_LAYERS)
        # If the target's differs, JetSpec has an adapter, which is not served.
        section.only({"target_hidden_size": hidden_size})
        section.known(in_either)
    top.only(OF_OTHER_LAYERS)
    top.known(in_either, names, BODY, OF_TARGETS, BOOKKEEPING, TOP)
    layer_types = top.layer_types(num_layers)
    config = DFlashConfig(
        path=path,
        format=name,
        draft_width=draft_width,
        sample_from_anchor=method.boolean("sample_from_anchor", False),
        mask_token_id=mask,
        target_layer_ids=tuple(ids),
        num_target_layers=num_target_layers,
        target_hidden_size=top.optional_positive("target_hidden_size") or hidden_size,
        hidden_size=hidden_size,
        intermediate_size=top.positive("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads_of_layer,
        num_kv_heads=top.optional_positive("num_key_value_heads") or heads_of_layer,
        head_dim=top.optional_positive("head_dim") or hidden_size // heads_of_layer,
        vocab_size=vocab_size,
        rms_norm_eps=top.positive_number("rms_norm_eps", 1e-6),
        attention_bias=top.boolean("attention_bias", False),
        max_position_embeddings=top.positive("max_position_embeddings"),
        attention=_attention(top, method, top.direction(sections), layer_types),
        rope=top.rope(layer_types),
        embedding_scale=method.optional_positive_number("input_embedding_scale"),
        own_embedding="embed_tokens.weight" in tensors,
        draft_vocab_size=rows,
        mask_embedding=tensors.has_mask_embedding(),
        quantization=top.quantization(),
        logit_multiplier=method.optional_positive_number("output_multiplier") or 1.0,
        logit_cap=method.optional_positive_number("final_logit_softcapping"),
    )
    return config, method


def _attention(
    top: Fields, method: Fields, causal: bool | None, layer_types: list[str]
) -> tuple[LayerAttention, ...]:
    """The attention of each layer, by the rules of z-lab's reference.

    Each position of a sliding layer sees the last `sliding_window` tokens, itself included.
    `use_swa` makes every layer slide. causal: of every layer, if the config states it. Else sliding
    layers are causal and the others are not.
    """
    if method.boolean("use_swa", False):
        layer_types = [SLIDING] * len(layer_types)
    window, other = method.optional_positive("swa_window_size"), top.window()
    if None not in (window, other) and window != other:
        raise top.refuse(f"has swa_window_size = {window}, but sliding_window = {other}")
    window = window or other
    windows_on = top.boolean("use_sliding_window", True)
    if SLIDING in layer_types and window is None and windows_on:
        raise top.refuse("has sliding_attention layers but no sliding_window")
    views = {
        SLIDING: LayerAttention(causal=True if causal is None else causal, window=window),
        FULL: LayerAttention(causal=bool(causal)),
    }
    return tuple(views[kind] for kind in layer_types)


def rename(name: str) -> str:
    """The draft model's name of the checkpoint's tensor `name`."""
    return name.removeprefix("model.")
