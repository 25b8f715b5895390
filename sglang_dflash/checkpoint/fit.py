"""Does a draft fit a target? The same checks run at server start and in `sglang-dflash inspect`."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dflash.config import DFlashConfig

VOCABULARY_PADDING = 1024  # published vocabularies are padded by less than this


@dataclass(frozen=True)
class Target:
    """What the checks need to know of a target."""

    path: str
    num_layers: int
    hidden_size: int
    vocab_size: int


@dataclass(frozen=True)
class Problem:
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what} {self.fix}"


def problems(draft: DFlashConfig, target: Target) -> list[Problem]:
    """Everything that keeps this draft from serving this target; empty if it fits."""
    found = []
    other = "Use the draft that was trained for this target."
    if draft.target_hidden_size != target.hidden_size:
        found.append(
            Problem(
                f"The draft reads target features of hidden size {draft.target_hidden_size}, the "
                f"target has {target.hidden_size}.",
                other,
            )
        )
    if draft.hidden_size != target.hidden_size:
        found.append(
            Problem(
                f"The draft's hidden size {draft.hidden_size} differs from the target's "
                f"{target.hidden_size}, whose embedding and LM head it uses.",
                other,
            )
        )
    if draft.num_target_layers not in (None, target.num_layers):
        found.append(
            Problem(
                f"The draft was trained on a target of {draft.num_target_layers} layers, the "
                f"target has {target.num_layers}.",
                other,
            )
        )
    beyond = [i for i in draft.target_layer_ids if i >= target.num_layers]
    if beyond:
        found.append(
            Problem(
                f"target_layer_ids {beyond} lie beyond the target's layers "
                f"0..{target.num_layers - 1}.",
                other,
            )
        )
    if abs(draft.vocab_size - target.vocab_size) >= VOCABULARY_PADDING:
        found.append(
            Problem(
                f"The draft's vocabulary has {draft.vocab_size} tokens, the target's "
                f"{target.vocab_size}.",
                other,
            )
        )
    if draft.mask_token_id >= target.vocab_size:
        found.append(
            Problem(
                f"mask_token_id {draft.mask_token_id} is not in the target's vocabulary of "
                f"{target.vocab_size}.",
                "Correct mask_token_id in the draft's config.json.",
            )
        )
    return found
