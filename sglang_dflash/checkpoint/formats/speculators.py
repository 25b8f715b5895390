"""Checkpoints of the speculators library: `speculators_model_type` dflash, dspark or dflash2.

Its layer ids are indices into Transformers' `hidden_states`, one more than z-lab's. Its drafts may
have a smaller vocabulary: `d2t` holds the *offset* from a draft id to the target's id. Its sliding
windows count back from the anchor for the whole block. They are causal in the block unless
`sliding_window_non_causal` is true, which is the default of DFlash 2 alone. vLLM also reads
`is_causal` for all layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sglang_dflash.checkpoint.config import DFlashConfig, LayerAttention
from sglang_dflash.checkpoint.fields import (
    FULL,
    MOST_LAYERS,
    MOST_POSITIONS,
    SLIDING,
    Fields,
)
from sglang_dflash.checkpoint.formats import dflash2, dspark
from sglang_dflash.checkpoint.known_keys import (
    BODY,
    BOOKKEEPING,
    DIRECTION,
    OF_OTHER_LAYERS,
    OF_TARGETS,
    TRAINING,
)
from sglang_dflash.checkpoint.tensors import Tensors

# The defaults of the library.
DEFAULT_DRAFT_WIDTH = 8
DEFAULT_DRAFT_VOCAB_SIZE = 32000
DEFAULT_MARKOV_RANK = 256
DEFAULTS_OF_DFLASH2 = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 256,
    "selector_top_k": 16,
}
HEAD_FIELDS: dict[str, tuple[str, ...]] = {
    "dflash": (),
    "dspark": dspark.HEAD_FIELDS,
    "dflash2": dflash2.HEAD_FIELDS,
}
METHOD = (
    *("speculators_model_type", "transformer_layer_config", "aux_hidden_state_layer_ids"),
    *("block_size", "mask_token_id", "sample_from_anchor", "sliding_window_non_causal"),
    *("target_hidden_size", "draft_vocab_size", "quantization_config"),
)
# The origin of a draft, and what a server of it may do.
OTHERS = (
    *("speculators_config", "speculators_version", "has_no_defaults_at_init"),
    "proposal_speculative_tokens",
)
SERVED = {"use_aux_hidden_state": True}


def matches(raw: dict[str, Any]) -> bool:
    """Whether a config.json is of this format."""
    return raw.get("speculators_model_type") in ("dflash", "dspark", "dflash2")


def read(raw: dict[str, Any], path: str, name: str, tensors: Tensors) -> DFlashConfig:
    """The configuration of a draft of this format. Raises `Refusal` for a wrong or missing field.

    raw: its config.json. path: its folder. name: this format's in `FORMATS`. tensors: the
    checkpoint's, by the model's own names.
    """
    top = Fields(raw, f"{path}/config.json")
    body = top.section("transformer_layer_config")
    ids = top.optional_layer_ids("aux_hidden_state_layer_ids", embedding=0)
    if ids is None:
        raise top.refuse("has no aux_hidden_state_layer_ids")
    mask = top.optional_int("mask_token_id")
    if mask is None:
        raise top.refuse("has no mask_token_id")
    body.must_be("hidden_act", "silu")
    kind = raw["speculators_model_type"]
    for place in (top, body):
        place.only(OF_OTHER_LAYERS | SERVED)
    either = (*DIRECTION, *TRAINING, *OF_OTHER_LAYERS, *BOOKKEEPING)
    top.known(either, METHOD, HEAD_FIELDS[kind], OTHERS, SERVED)
    body.known(either, BODY, OF_TARGETS)
    hidden_size, heads = body.positive("hidden_size"), body.positive("num_attention_heads")
    num_layers = body.positive("num_hidden_layers", MOST_LAYERS)
    layer_types = body.layer_types(num_layers)
    window = body.window()
    if SLIDING in layer_types and window is None:
        raise body.refuse("has sliding_attention layers but no sliding_window")
    causal = top.direction([body])
    slides_causal = _slides_causal(top, kind, causal if SLIDING in layer_types else None)
    views = {
        SLIDING: LayerAttention(causal=slides_causal, window=window, anchored=True),
        FULL: LayerAttention(causal=bool(causal)),
    }
    vocab_size = body.positive("vocab_size")
    rows = tensors.rows("lm_head.weight")
    draft_vocab_size = top.optional_positive("draft_vocab_size") or DEFAULT_DRAFT_VOCAB_SIZE
    if rows is None and draft_vocab_size != vocab_size and tensors.known:
        raise top.refuse(
            f"has draft_vocab_size {draft_vocab_size} of {vocab_size} but no lm_head.weight"
        )
    plain = DFlashConfig(
        path=path,
        format=name,
        draft_width=top.optional_positive("block_size", MOST_POSITIONS) or DEFAULT_DRAFT_WIDTH,
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
        rms_norm_eps=body.positive_number("rms_norm_eps", 1e-6),
        attention_bias=body.boolean("attention_bias", False),
        max_position_embeddings=body.positive("max_position_embeddings"),
        attention=tuple(views[kind] for kind in layer_types),
        rope=body.rope(layer_types),
        embedding_scale=1.0,  # trained on plain copies of the target's embedding
        own_embedding="embed_tokens.weight" in tensors,
        draft_vocab_size=rows,
        vocabulary_map="d2t" in tensors,
        mask_embedding=tensors.has_mask_embedding(),
        quantization=top.quantization(),
    )
    if kind == "dspark":
        family = dspark.read_heads(top, DEFAULT_MARKOV_RANK, enabled=True, with_markov=True)
        return replace(plain, family=family)
    if kind == "dflash2":
        if {draft_vocab_size, rows or vocab_size} != {vocab_size}:
            raise top.refuse(
                f"has draft_vocab_size {draft_vocab_size} of {vocab_size}, and a DFlash 2 draft "
                "has the target's vocabulary"
            )
        parts = dflash2.read_parts(top.over(DEFAULTS_OF_DFLASH2), plain)
        return replace(plain, family=parts)
    return plain


def _slides_causal(top: Fields, kind: str, causal: bool | None) -> bool:
    """Whether sliding layers are causal in the block.

    causal: what the config states of every layer, and must agree with. None: nothing.
    """
    non_causal = top.optional_boolean("sliding_window_non_causal")
    if causal is None:
        return not (kind == "dflash2" if non_causal is None else non_causal)
    if causal == non_causal:
        raise top.refuse(
            f"has sliding_window_non_causal = {non_causal}, but states that all layers are "
            f"{'' if causal else 'not '}causal"
        )
    return causal


def rename(name: str) -> str:
    """The draft model's name of the checkpoint's tensor `name`."""
    return dflash2.rename(name)


def verifier_of(raw: dict[str, Any]) -> str | None:
    """The target that the checkpoint names, or None."""
    value: Any = raw
    for key in ("speculators_config", "verifier", "name_or_path"):
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value if isinstance(value, str) and value else None
