"""z-lab checkpoints and SpecForge exports: `DFlashDraftModel`, method fields in `dflash_config`."""

from __future__ import annotations

from typing import Any

from sglang_dflash.checkpoint.fields import Fields
from sglang_dflash.checkpoint.tensors import Tensors
from sglang_dflash.config import DFlashConfig, LayerAttention

# The first two do not move the largest logit while they are positive, and drafts are argmax.
POSITIVE = ("final_logit_softcapping", "output_multiplier", "input_embedding_scale")


def matches(raw: dict[str, Any]) -> bool:
    return "DFlashDraftModel" in (raw.get("architectures") or ())


def default_target_layer_ids(num_target_layers: int, count: int) -> list[int]:
    """z-lab's choice where the checkpoint names none: spread over layers 1 .. L-3."""
    if count == 1:
        return [num_target_layers // 2]
    return [round(1 + i * (num_target_layers - 4) / (count - 1)) for i in range(count)]


def read(raw: dict[str, Any], path: str, name: str, tensors: Tensors) -> DFlashConfig:
    top = Fields(raw, f"{path}/config.json")
    method = top.section("dflash_config")

    def either(key: str) -> Fields:
        """The section that holds a field: `dflash_config`, else the top level."""
        return method if method.raw.get(key) is not None else top

    num_layers = top.positive("num_hidden_layers")
    num_target_layers = either("num_target_layers").optional_positive("num_target_layers")
    ids = either("target_layer_ids").optional_ints("target_layer_ids")
    if ids is None:
        if num_target_layers is None:
            raise top.refuse(
                "names neither target_layer_ids nor num_target_layers, so the target layers that "
                "the draft was trained on are unknown; add dflash_config.target_layer_ids"
            )
        ids = default_target_layer_ids(num_target_layers, num_layers)
    mask = either("mask_token_id").optional_int("mask_token_id")
    if mask is None:
        raise top.refuse("has no mask_token_id; add dflash_config.mask_token_id")
    block_size = either("block_size").optional_positive("block_size")
    if block_size is None:
        raise top.refuse("has no block_size; add the block size that the draft was trained with")
    top.must_be("hidden_act", "silu")
    for key in POSITIVE:
        either(key).positive_number(key)
    hidden_size, heads = top.positive("hidden_size"), top.positive("num_attention_heads")
    layer_types = top.layer_types(num_layers)
    return DFlashConfig(
        path=path,
        format=name,
        block_size=block_size,
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
        rms_norm_eps=top.number("rms_norm_eps", 1e-6),
        attention_bias=top.boolean("attention_bias", False),
        max_position_embeddings=top.positive("max_position_embeddings"),
        attention=_attention(top, method, layer_types),
        rope=top.rope(layer_types),
        variable_block_size=either("variable_block_size").boolean("variable_block_size", False),
        embedding_scale=either("input_embedding_scale").positive_number("input_embedding_scale"),
        own_embedding="embed_tokens.weight" in tensors,
        draft_vocab_size=tensors.rows("lm_head.weight"),
        mask_embedding=tensors.has_file("mask_embedding.pt"),
        quantization=raw.get("quantization_config"),
    )


def _attention(top: Fields, method: Fields, layer_types: list[str]) -> tuple[LayerAttention, ...]:
    """z-lab's reference: a sliding layer is causal unless `causal` says otherwise, and each of its
    positions sees the last `sliding_window` tokens, itself included. `use_swa` makes all slide."""
    section = method if method.raw.get("causal") is not None else top
    causal = section.boolean("causal" if section is method else "is_causal", False)
    stated = section.raw.get("causal" if section is method else "is_causal") is not None
    if method.boolean("use_swa", False):
        layer_types = ["sliding_attention"] * len(layer_types)
    window = method.optional_positive("swa_window_size") or top.window()
    switched_off = not top.boolean("use_sliding_window", True)
    if "sliding_attention" in layer_types and window is None and not switched_off:
        raise top.refuse("has sliding_attention layers but no sliding_window")
    return tuple(
        LayerAttention(causal=causal if stated else True, window=window)
        if kind == "sliding_attention"
        else LayerAttention(causal=causal)
        for kind in layer_types
    )


def rename(name: str) -> str:
    return name.removeprefix("model.")
