"""z-lab checkpoints and SpecForge exports: `DFlashDraftModel`, method fields in `dflash_config`."""

from __future__ import annotations

from typing import Any

from sglang_dflash.checkpoint.config import DFlashConfig, LayerAttention
from sglang_dflash.checkpoint.fields import (
    FULL,
    MOST_LAYERS,
    MOST_POSITIONS,
    OF_OTHER_LAYERS,
    SLIDING,
    Fields,
)
from sglang_dflash.checkpoint.tensors import Tensors


def projector_type(raw: dict[str, Any]) -> Any:
    """The kind of draft that a config states, in `dflash_config` or at the top level."""
    method = raw.get("dflash_config") or {}
    return method.get("projector_type") or raw.get("projector_type")


def matches(raw: dict[str, Any]) -> bool:
    """Whether a config.json is of this format."""
    return "DFlashDraftModel" in (raw.get("architectures") or ())


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
    top = Fields(raw, f"{path}/config.json")
    method = top.section("dflash_config")

    def either(key: str) -> Fields:
        """The section to read a field from: `dflash_config` if it has the field, else the top."""
        return method if method.raw.get(key) is not None else top

    num_layers = top.positive("num_hidden_layers", MOST_LAYERS)
    num_target_layers = either("num_target_layers").optional_positive(
        "num_target_layers", MOST_LAYERS
    )
    ids = either("target_layer_ids").optional_layer_ids("target_layer_ids", embedding=-1)
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
    mask = either("mask_token_id").optional_int("mask_token_id")
    if mask is None:
        raise top.refuse("has no mask_token_id", "Add dflash_config.mask_token_id.")
    draft_width = either("block_size").optional_positive("block_size", MOST_POSITIONS)
    if draft_width is None:
        raise top.refuse("has no block_size", "Add the block size that the draft was trained with.")
    top.must_be("hidden_act", "silu")
    method.over(raw).only(OF_OTHER_LAYERS)
    either("attention_mode").must_be("attention_mode", "mha", "gqa")

    def factor(key: str) -> float | None:
        return either(key).optional_positive_number(key)

    hidden_size, heads = top.positive("hidden_size"), top.positive("num_attention_heads")
    layer_types = top.layer_types(num_layers)
    return DFlashConfig(
        path=path,
        format=name,
        draft_width=draft_width,
        sample_from_anchor=either("sample_from_anchor").boolean("sample_from_anchor", False),
        mask_token_id=mask,
        target_layer_ids=tuple(ids),
        num_target_layers=num_target_layers,
        target_hidden_size=top.optional_positive("target_hidden_size") or hidden_size,
        hidden_size=hidden_size,
        intermediate_size=top.positive("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=top.optional_positive("num_key_value_heads") or heads,
        head_dim=top.optional_positive("head_dim") or hidden_size // heads,
        vocab_size=top.positive("vocab_size"),
        rms_norm_eps=top.positive_number("rms_norm_eps", 1e-6),
        attention_bias=top.boolean("attention_bias", False),
        max_position_embeddings=top.positive("max_position_embeddings"),
        attention=_attention(top, method, layer_types),
        rope=top.rope(layer_types),
        embedding_scale=factor("input_embedding_scale"),
        own_embedding="embed_tokens.weight" in tensors,
        draft_vocab_size=tensors.rows("lm_head.weight"),
        mask_embedding=tensors.has_mask_embedding(),
        quantization=top.quantization(),
        logit_multiplier=factor("output_multiplier") or 1.0,
        logit_cap=factor("final_logit_softcapping"),
    )


def _attention(top: Fields, method: Fields, layer_types: list[str]) -> tuple[LayerAttention, ...]:
    """The attention of each layer, by the rules of z-lab's reference.

    Each position of a sliding layer sees the last `sliding_window` tokens, itself included.
    `use_swa` makes every layer slide. `causal` (or `is_causal` at the top level) holds for every
    layer. If neither is stated, sliding layers are causal and the others are not.
    """
    causal = method.optional_boolean("causal")
    if causal is None:
        causal = top.optional_boolean("is_causal")
    if method.boolean("use_swa", False):
        layer_types = [SLIDING] * len(layer_types)
    window = method.optional_positive("swa_window_size") or top.window()
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
