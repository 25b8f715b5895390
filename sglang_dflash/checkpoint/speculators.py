"""Checkpoints of the speculators library: `speculators_model_type: dflash`.

Its layer ids are indices into Transformers' `hidden_states`, one more than z-lab's. Its drafts can
speak a smaller vocabulary: `d2t` holds the *offset* from a draft id to the target's id. Its sliding
windows count back from the anchor for the whole block, causal in the block unless
`sliding_window_non_causal`.
"""

from __future__ import annotations

from typing import Any

from sglang_dflash.checkpoint.fields import Fields
from sglang_dflash.checkpoint.tensors import Tensors
from sglang_dflash.config import DFlashConfig, LayerAttention


def matches(raw: dict[str, Any]) -> bool:
    return raw.get("speculators_model_type") == "dflash"


def read(raw: dict[str, Any], path: str, name: str, tensors: Tensors) -> DFlashConfig:
    top = Fields(raw, f"{path}/config.json")
    body = top.section("transformer_layer_config")
    ids = top.optional_ints("aux_hidden_state_layer_ids")
    if ids is None or ids[0] == 0:
        raise top.refuse(f"has aux_hidden_state_layer_ids = {ids}, which must be 1 or more")
    mask = top.optional_int("mask_token_id")
    if mask is None:
        raise top.refuse("has no mask_token_id")
    body.must_be("hidden_act", "silu")
    hidden_size, heads = body.positive("hidden_size"), body.positive("num_attention_heads")
    num_layers = body.positive("num_hidden_layers")
    layer_types = body.layer_types(num_layers)
    window = body.window()
    if "sliding_attention" in layer_types and window is None:
        raise body.refuse("has sliding_attention layers but no sliding_window")
    causal = not top.boolean("sliding_window_non_causal", False)
    sliding = LayerAttention(causal=causal, window=window, anchored=True)
    vocab_size = body.positive("vocab_size")
    rows = tensors.rows("lm_head.weight")
    draft_vocab_size = top.optional_positive("draft_vocab_size") or 32000
    if rows is None and draft_vocab_size != vocab_size and tensors.known:
        raise top.refuse(
            f"has draft_vocab_size {draft_vocab_size} of {vocab_size} but brings no lm_head.weight"
        )
    return DFlashConfig(
        path=path,
        format=name,
        block_size=top.optional_positive("block_size") or 8,
        sample_from_anchor=top.boolean("sample_from_anchor", False),
        mask_token_id=mask,
        target_layer_ids=tuple(i - 1 for i in ids),
        num_target_layers=None,
        target_hidden_size=top.optional_positive("target_hidden_size") or hidden_size,
        hidden_size=hidden_size,
        intermediate_size=body.positive("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=body.optional_positive("num_key_value_heads") or heads,
        head_dim=body.optional_positive("head_dim") or hidden_size // heads,
        vocab_size=vocab_size,
        rms_norm_eps=body.number("rms_norm_eps", 1e-6),
        attention_bias=body.boolean("attention_bias", False),
        max_position_embeddings=body.positive("max_position_embeddings"),
        attention=tuple(
            sliding if kind == "sliding_attention" else LayerAttention() for kind in layer_types
        ),
        rope=body.rope(layer_types),
        own_embedding="embed_tokens.weight" in tensors,
        draft_vocab_size=rows,
        vocabulary_map="d2t" in tensors,
        mask_embedding=tensors.has_file("mask_embedding.pt"),
        quantization=raw.get("quantization_config"),
    )


def rename(name: str) -> str:
    return name.removeprefix("model.")


def verifier_of(raw: dict[str, Any]) -> str | None:
    """The target that the checkpoint names inside, where it names one."""
    section = raw.get("speculators_config")
    verifier = section.get("verifier") if isinstance(section, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return name if isinstance(name, str) and name else None
