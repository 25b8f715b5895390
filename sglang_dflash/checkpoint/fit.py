"""Checks whether a draft fits a target. The server runs them at startup, and so does `inspect`."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.checkpoint.fields import CORRECT_CONFIG, Name, Names, Place, Positive
from sglang_dflash.checkpoint.tensors import Tensors, faults
from sglang_dflash.errors import WITHOUT_DFLASH, Refusal

VOCABULARY_PADDING = 1024  # published vocabularies are padded by less than this
ROPE_TYPES = ("default", "linear", "yarn", "llama3")  # the others depend on the served length
NAMED_FAULTS = 3  # the most faults of weights that a refusal names
OTHER_DRAFT = "Use the draft that was trained for this target."
OTHER_STATES = (
    "has recurrent states (Mamba, short convolutions or similar). Its class in SGLang returns no "
    "hidden states, and most of its layers cannot verify a block."
)
TARGET_FIELDS = ("num_hidden_layers", "hidden_size", "vocab_size")
STATE_LAYERS = {"linear_attention", "mamba", "conv", "jet"}
SERVED_STATES = ("qwen3_next", "qwen3_5", "intern_s2_preview")  # how model_type begins
STATE_FIELDS = ("linear_attn_config", "linear_num_value_heads", "mamba_d_ssm")


@dataclass(frozen=True)
class Target:
    """The properties of a target that the checks compare with a draft."""

    path: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    keeps_other_states: bool = False  # it has recurrent states that are not served


def target_of(place: Place, path: str) -> Target:
    """The target that the (text) fields of a config.json describe. Raises `Refusal`."""
    sizes = {key: place.one(key, Positive) for key in TARGET_FIELDS}
    missing = [key for key, size in sizes.items() if size is None]
    if missing:
        raise place.refuse(
            f"is not the config of a target: it has no {' and no '.join(missing)}",
            "Give the folder of a target as --target.",
        )
    layers, hidden_size, vocab_size = sizes.values()
    return Target(path, layers, hidden_size, vocab_size, _keeps_other_states(place))


def _keeps_other_states(place: Place) -> bool:
    """Whether a target has recurrent states that are not served.

    Those of gated delta networks are, in the classes of SGLang that return hidden states. This goes
    by names, because `inspect` runs without SGLang. A server asks the classes (`targets.hybrid`).
    """
    if place.one("model_type", Name, "").startswith(SERVED_STATES):
        return False
    kinds = {*place.one("layer_types", Names, ()), *place.one("layers_block_type", Names, ())}
    if kinds:
        return not kinds.isdisjoint(STATE_LAYERS)
    # Nemotron H: one letter per layer
    pattern = place.one("hybrid_override_pattern", Name, "")
    return "M" in pattern or not place.raw.keys().isdisjoint(STATE_FIELDS)


def misfits(draft: DFlashConfig, target: Target) -> list[Refusal]:
    """Every reason why this draft cannot serve this target. Empty if it can."""
    beyond = [i for i in draft.target_layer_ids if i >= target.num_layers]
    uses_target_vocabulary = not draft.own_embedding or draft.draft_vocab_size is None
    padding = abs(draft.vocab_size - target.vocab_size)
    checks = (  # (whether it does not fit, the refusal)
        (
            target.keeps_other_states,
            f"The target {target.path} {OTHER_STATES}",
            WITHOUT_DFLASH,
        ),
        (
            draft.target_hidden_size != target.hidden_size,
            f"The draft reads target features of hidden size {draft.target_hidden_size}, the "
            f"target has {target.hidden_size}.",
            OTHER_DRAFT,
        ),
        (
            uses_target_vocabulary and draft.hidden_size != target.hidden_size,
            f"The draft's hidden size {draft.hidden_size} differs from the target's "
            f"{target.hidden_size}, whose embedding or LM head it uses.",
            OTHER_DRAFT,
        ),
        (
            draft.num_target_layers not in (None, target.num_layers),
            f"The draft was trained on a target of {draft.num_target_layers} layers, the target "
            f"has {target.num_layers}.",
            OTHER_DRAFT,
        ),
        (
            bool(beyond),
            f"The target_layer_ids {beyond} lie beyond the target's layers "
            f"0..{target.num_layers - 1}.",
            OTHER_DRAFT,
        ),
        (
            padding >= VOCABULARY_PADDING,
            f"The draft's vocabulary has {draft.vocab_size} tokens, the target's "
            f"{target.vocab_size}.",
            OTHER_DRAFT,
        ),
        (
            draft.mask_token_id >= min(draft.vocab_size, target.vocab_size),
            f"The mask_token_id {draft.mask_token_id} is not in the vocabulary of "
            f"{target.vocab_size}.",
            "Correct mask_token_id in the draft's config.json.",
        ),
    )
    return [Refusal(what, fix) for does_not_fit, what, fix in checks if does_not_fit]


def defects(draft: DFlashConfig, tensors: Tensors, draft_width: int) -> list[Refusal]:
    """Every reason why no target can be served with this draft. Empty if one can.

    draft_width: positions that the draft is to read at once, the anchor and masks.
    """
    wrong = faults(draft, tensors)
    named = "; ".join(wrong[:NAMED_FAULTS])
    more = f" and {len(wrong) - NAMED_FAULTS} more" if len(wrong) > NAMED_FAULTS else ""
    kinds = {(rope.scaling or {}).get("rope_type", "default") for rope in draft.rope}
    unknown = sorted(kinds.difference(ROPE_TYPES))
    windows = [view.window for view in draft.attention if view.window is not None]
    shortest = min(windows, default=draft_width)
    checks = (  # (whether it is a defect, the refusal)
        (
            bool(wrong),
            f"The weights do not fit the config: {named}{more}.",
            CORRECT_CONFIG,
        ),
        (
            bool(unknown),
            f"RoPE of type {', '.join(unknown)} is not served.",
            f"Use a draft with RoPE of one of the types {', '.join(ROPE_TYPES)}.",
        ),
        (
            not draft.head_dim
            or draft.head_dim % 2 == 1
            or draft.num_heads % draft.num_kv_heads != 0,
            f"The draft has {draft.num_heads} heads of size {draft.head_dim} and "
            f"{draft.num_kv_heads} KV heads. The size must be even and not 0, and the counts must "
            "divide.",
            CORRECT_CONFIG,
        ),
        (
            shortest < draft_width,
            f"A block of {draft_width} does not fit the draft's window of {shortest}.",
            "Give a shorter --speculative-dflash-block-size.",
        ),
    )
    return [Refusal(what, fix) for is_defect, what, fix in checks if is_defect]
