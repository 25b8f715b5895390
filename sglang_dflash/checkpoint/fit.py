"""Does a draft fit a target? The same checks run at server start and in `sglang-dflash inspect`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_dflash.checkpoint.tensors import Tensors, faults
from sglang_dflash.config import DFlashConfig

VOCABULARY_PADDING = 1024  # published vocabularies are padded by less than this
ROPE_TYPES = ("default", "linear", "yarn", "llama3")  # the others depend on the served length
OTHER_DRAFT = "Use the draft that was trained for this target."
FETCH_AGAIN = "Fetch the draft again, or correct its config.json."


@dataclass(frozen=True)
class Target:
    """What the checks need to know of a target."""

    path: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    keeps_state: bool = False  # Mamba, GDN and alike


STATE_LAYERS = {"linear_attention", "mamba", "conv", "jet"}
STATE_FIELDS = ("linear_attn_config", "linear_num_value_heads", "mamba_d_ssm")


def keeps_state(raw: dict[str, Any]) -> bool:
    """Whether a target's (text) config.json describes layers with a recurrent state."""
    kinds = {*(raw.get("layer_types") or ()), *(raw.get("layers_block_type") or ())}
    if kinds:
        return bool(kinds & STATE_LAYERS)
    pattern = str(raw.get("hybrid_override_pattern") or "")  # Nemotron H
    return "M" in pattern or any(raw.get(name) is not None for name in STATE_FIELDS)


@dataclass(frozen=True)
class Problem:
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what} {self.fix}"


def misfits(draft: DFlashConfig, target: Target) -> list[Problem]:
    """Everything that keeps this draft from serving this target; empty if it fits."""
    found = []
    if target.keeps_state:
        what = "The target keeps a recurrent state, whose right step is not committed after a "
        found.append(Problem(f"{what}partial acceptance.", "Serve it without DFLASH."))
    if draft.target_hidden_size != target.hidden_size:
        what = f"The draft reads target features of hidden size {draft.target_hidden_size}, the "
        found.append(Problem(f"{what}target has {target.hidden_size}.", OTHER_DRAFT))
    shares = not (draft.own_embedding and draft.draft_vocab_size is not None)
    if shares and draft.hidden_size != target.hidden_size:
        what = f"The draft's hidden size {draft.hidden_size} differs from the target's "
        found.append(
            Problem(f"{what}{target.hidden_size}, whose embedding or LM head it uses.", OTHER_DRAFT)
        )
    if draft.num_target_layers not in (None, target.num_layers):
        what = f"The draft was trained on a target of {draft.num_target_layers} layers, the target "
        found.append(Problem(f"{what}has {target.num_layers}.", OTHER_DRAFT))
    beyond = [i for i in draft.target_layer_ids if i >= target.num_layers]
    if beyond:
        what = f"target_layer_ids {beyond} lie beyond the target's layers "
        found.append(Problem(f"{what}0..{target.num_layers - 1}.", OTHER_DRAFT))
    if abs(draft.vocab_size - target.vocab_size) >= VOCABULARY_PADDING:
        what = f"The draft's vocabulary has {draft.vocab_size} tokens, the target's "
        found.append(Problem(f"{what}{target.vocab_size}.", OTHER_DRAFT))
    if draft.mask_token_id >= min(draft.vocab_size, target.vocab_size):
        what = f"mask_token_id {draft.mask_token_id} is not in the vocabulary of "
        found.append(
            Problem(
                f"{what}{target.vocab_size}.", "Correct mask_token_id in the draft's config.json."
            )
        )
    return found


def defects(draft: DFlashConfig, tensors: Tensors, draft_width: int) -> list[Problem]:
    """What is wrong with a draft that reads `draft_width` positions; empty if it can be served."""
    found = []
    if wrong := faults(draft, tensors):
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        what = f"The weights do not fit the config: {'; '.join(wrong[:3])}{more}."
        found.append(Problem(what, FETCH_AGAIN))
    kinds = {(rope.scaling or {}).get("rope_type", "default") for rope in draft.rope}
    if unknown := sorted(kinds - set(ROPE_TYPES)):
        what = f"RoPE of type {', '.join(unknown)} is not served."
        found.append(Problem(what, f"Served are {', '.join(ROPE_TYPES)}."))
    if any((r.scaling or {}).get("partial_rotary_factor", 1.0) != 1.0 for r in draft.rope):
        found.append(Problem("The draft rotates part of a head only.", "Use another draft."))
    if draft.head_dim % 2 or draft.num_heads % draft.num_kv_heads:
        what = f"{draft.num_heads} heads of {draft.head_dim} over {draft.num_kv_heads} KV heads"
        found.append(Problem(f"{what} do not divide.", FETCH_AGAIN))
    windows = [view.window for view in draft.attention if view.window is not None]
    if windows and min(windows) < draft_width:
        what = f"A block of {draft_width} does not fit the draft's window of {min(windows)}."
        found.append(Problem(what, "Give a shorter --speculative-dflash-block-size."))
    return found
