"""z-lab checkpoints and SpecForge exports: `DFlashDraftModel`, method fields in `dflash_config`."""

from __future__ import annotations

from typing import Any

from sglang_dflash.checkpoint.fields import Fields
from sglang_dflash.config import DFlashConfig


def matches(raw: dict[str, Any]) -> bool:
    return "DFlashDraftModel" in (raw.get("architectures") or ()) or "dflash_config" in raw


def default_target_layer_ids(num_target_layers: int, count: int) -> list[int]:
    """z-lab's choice where the checkpoint names none: spread over layers 1 .. L-3."""
    if count == 1:
        return [num_target_layers // 2]
    return [round(1 + i * (num_target_layers - 4) / (count - 1)) for i in range(count)]


def read(raw: dict[str, Any], path: str, name: str) -> DFlashConfig:
    top = Fields(raw, f"{path}/config.json")
    method = top.section("dflash_config")
    num_layers = top.positive("num_hidden_layers")
    num_target_layers = method.optional_positive("num_target_layers") or top.optional_positive(
        "num_target_layers"
    )
    ids = method.optional_ints("target_layer_ids") or top.optional_ints("target_layer_ids")
    if ids is None:
        if num_target_layers is None:
            raise top.refuse(
                "names neither target_layer_ids nor num_target_layers, so the target layers that "
                "the draft was trained on are unknown; add dflash_config.target_layer_ids"
            )
        ids = default_target_layer_ids(num_target_layers, num_layers)
    mask = method.optional_int("mask_token_id")
    mask = top.optional_int("mask_token_id") if mask is None else mask
    if mask is None:
        raise top.refuse("has no mask_token_id; add dflash_config.mask_token_id")
    block_size = method.optional_positive("block_size") or top.optional_positive("block_size")
    if block_size is None:
        raise top.refuse("has no block_size; add the block size that the draft was trained with")
    hidden_size, heads = top.positive("hidden_size"), top.positive("num_attention_heads")
    theta, scaling = top.rope()
    return DFlashConfig(
        path=path,
        format=name,
        block_size=block_size,
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
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        attention_bias=bool(raw.get("attention_bias", False)),
        max_position_embeddings=top.positive("max_position_embeddings"),
        rope_theta=theta,
        rope_scaling=scaling,
    )


def rename(name: str) -> str:
    return name.removeprefix("model.")
