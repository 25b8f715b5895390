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

from sglang_dflash.checkpoint import transformer
from sglang_dflash.checkpoint.config import SLIDING, DFlashConfig, Family, LayerAttention
from sglang_dflash.checkpoint.fields import (
    Fields,
    Flag,
    LayerIds,
    NumPositions,
    Place,
    Positive,
    Quantization,
    Unread,
    Whole,
)
from sglang_dflash.checkpoint.formats import dflash2, dspark
from sglang_dflash.checkpoint.known_keys import BOOKKEEPING, OF_OTHER_LAYERS, OF_TARGETS, TRAINING
from sglang_dflash.checkpoint.tensors import Tensors


class Method(Fields):
    """Fields at the top level. The defaults here and below are those of the library."""

    speculators_model_type: Unread  # `matches` reads it
    transformer_layer_config: Unread = None  # the section of the layers
    aux_hidden_state_layer_ids: LayerIds
    block_size: NumPositions = 8
    mask_token_id: Whole
    sample_from_anchor: Flag = False
    sliding_window_non_causal: Flag | None = None
    target_hidden_size: Positive | None = None
    draft_vocab_size: Positive = 32000
    quantization_config: Quantization | None = None


class DSparkHeads(dspark.Heads):
    sample_from_anchor: Flag = False
    markov_rank: Whole = 256
    enable_confidence_head: Flag | None = True
    confidence_head_alpha: Unread = None
    confidence_head_with_markov: Unread = True


class DFlash2Parts(dflash2.Parts):
    conv_kernel_size: Positive | None = 2
    conv_group_size: Positive | None = 16
    selector_rank: Positive | None = 256
    selector_top_k: dflash2.NumCandidates | None = 16


HEADS = {"dflash": Fields, "dspark": DSparkHeads, "dflash2": DFlash2Parts}
# The origin of a draft, and what a server of it may do.
OTHERS = (
    *("speculators_config", "speculators_version", "has_no_defaults_at_init"),
    "proposal_speculative_tokens",
)
SERVED = {"use_aux_hidden_state": True}


def matches(raw: dict[str, Any]) -> bool:
    """Whether a config.json is of this format."""
    return raw.get("speculators_model_type") in HEADS


def read(raw: dict[str, Any], path: str, name: str, tensors: Tensors) -> DFlashConfig:
    """The configuration of a draft of this format. Raises `Refusal`, which names the field."""
    top = Place(raw, f"{path}/config.json")
    layers = top.section("transformer_layer_config")
    method, body = top.read(Method), layers.read(transformer.Body)
    _check_keys(top, layers)
    _check_vocabulary(top, method, body, tensors)
    layer_types = transformer.read_layer_types(layers, body)
    ids = method.aux_hidden_state_layer_ids
    plain = DFlashConfig(
        path=path,
        format=name,
        draft_width=method.block_size,
        sample_from_anchor=method.sample_from_anchor,
        mask_token_id=method.mask_token_id,
        target_layer_ids=transformer.layers_of(top, "aux_hidden_state_layer_ids", ids, embedding=0),
        num_target_layers=None,
        target_hidden_size=method.target_hidden_size or body.hidden_size,
        attention=_attention(top, layers, method, body, layer_types),
        embedding_scale=1.0,  # trained on plain copies of the target's embedding
        vocabulary_map="d2t" in tensors,
        quantization=method.quantization_config,
        **transformer.in_common(layers, body, layer_types, tensors),
    )
    return replace(plain, family=_family(top, plain))


def _check_keys(top: Place, layers: Place) -> None:
    """Raise `Refusal` for a key that is not known, or a value that other layers have."""
    for place in (top, layers):
        place.only(OF_OTHER_LAYERS | SERVED)
    either = (*transformer.Direction.model_fields, *TRAINING, *OF_OTHER_LAYERS, *BOOKKEEPING)
    head = HEADS[top.raw["speculators_model_type"]]
    top.known(either, Method.model_fields, head.model_fields, OTHERS, SERVED)
    layers.known(either, transformer.Body.model_fields, OF_TARGETS)


def _check_vocabulary(top: Place, method: Method, body: transformer.Body, tensors: Tensors) -> None:
    """Raise `Refusal` unless a smaller vocabulary has an LM head, and belongs to its family."""
    rows = tensors.rows("lm_head.weight")
    size, whole = method.draft_vocab_size, body.vocab_size
    if rows is None and size != whole and tensors.known:
        raise top.refuse(f"has draft_vocab_size {size} of {whole} but no lm_head.weight")
    if method.speculators_model_type == "dflash2" and {size, rows or whole} != {whole}:
        raise top.refuse(
            f"has draft_vocab_size {size} of {whole}, and a DFlash 2 draft has the target's "
            "vocabulary"
        )


def _attention(
    top: Place, layers: Place, method: Method, body: transformer.Body, layer_types: list[str]
) -> tuple[LayerAttention, ...]:
    """The attention of each layer, by the rules of the library."""
    causal = transformer.read_direction(top, [layers])
    if SLIDING in layer_types and body.window is None:
        raise layers.refuse("has sliding_attention layers but no sliding_window")
    slides_causal = _slides_causal(top, method, causal if SLIDING in layer_types else None)
    slides = LayerAttention(causal=slides_causal, window=body.window, anchored=True)
    full = LayerAttention(causal=bool(causal))
    return tuple(slides if kind == SLIDING else full for kind in layer_types)


def _slides_causal(top: Place, method: Method, causal: bool | None) -> bool:
    """Whether sliding layers are causal in the block.

    causal: what the config states of every layer, and must agree with. None: nothing.
    """
    non_causal = method.sliding_window_non_causal
    if causal is None:
        by_default = method.speculators_model_type == "dflash2"
        return not (by_default if non_causal is None else non_causal)
    if causal == non_causal:
        raise top.refuse(
            f"has sliding_window_non_causal = {non_causal}, but states that all layers are "
            f"{'' if causal else 'not '}causal"
        )
    return causal


def _family(top: Place, plain: DFlashConfig) -> Family:
    """What the draft adds to DFlash. plain: the draft without it."""
    kind = top.raw["speculators_model_type"]
    if kind == "dspark":
        return dspark.read_heads(top, top.read(DSparkHeads))
    if kind == "dflash2":
        return dflash2.read_parts(top, top.read(DFlash2Parts), plain)
    return Family()


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
