"""Domino checkpoints of SpecForge: z-lab's fields, and those of the GRU.

SpecForge writes `DominoDraftModel`. Its normaliser writes `DFlashDraftModel`, so the projector type
is read before the architecture.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from sglang_dflash.checkpoint.config import DFlashConfig, Family, Shape
from sglang_dflash.checkpoint.fields import Fields, Flag, Positive, Whole
from sglang_dflash.checkpoint.formats import zlab
from sglang_dflash.checkpoint.tensors import Tensors


class Gru(Fields):
    """Fields beside z-lab's. The defaults are those of SpecForge's class."""

    emb_dim: Positive
    gru_hidden_dim: Positive
    pure_draft_prefix_len: Whole = 0
    shift_label: Flag = False


@dataclass(frozen=True)
class Domino(Family):
    """A GRU over the tokens before a draft corrects its logits."""

    name: ClassVar[str] = "Domino"
    module: ClassVar[str] = "domino"

    emb_dim: int  # width of the correction's inner layer
    gru_hidden_dim: int
    pure_prefix: int  # first drafts of a block, whose logits are not corrected
    shifted: bool  # position j predicts token j + 1, and the last one nothing; else token j

    def shapes(self, draft: DFlashConfig) -> dict[str, Shape]:
        hidden, inner, state = draft.hidden_size, self.emb_dim, self.gru_hidden_dim
        return {
            "prefix_gru.weight_ih_l0": (3 * state, hidden),
            "prefix_gru.weight_hh_l0": (3 * state, state),
            "embed_proj.0.weight": (inner, hidden + state),
            "embed_proj.2.weight": (draft.columns, inner),
        }

    def parts(self) -> list[str]:
        labels = "shifted" if self.shifted else "not shifted"
        sizes = f"state {self.gru_hidden_dim}, inner {self.emb_dim}, pure prefix {self.pure_prefix}"
        return [f"prefix GRU ({sizes}, labels {labels})"]


def matches(raw: dict[str, Any]) -> bool:
    """Whether a config.json is of this format."""
    stated = zlab.projector_type(raw)
    if stated is not None:
        return bool(stated == "domino")
    return "DominoDraftModel" in (raw.get("architectures") or ())


def read(raw: dict[str, Any], path: str, name: str, tensors: Tensors) -> DFlashConfig:
    """The configuration of a draft of this format. Raises `Refusal`, which names the field."""
    body, method = zlab.read_body(raw, path, name, tensors, Gru)
    gru = method.read(Gru)
    if body.sample_from_anchor:
        raise method.refuse("has sample_from_anchor, which a Domino draft states by shift_label")
    if gru.pure_draft_prefix_len >= body.draft_width:
        raise method.refuse(
            f"has pure_draft_prefix_len = {gru.pure_draft_prefix_len}, which must be less than "
            f"block_size = {body.draft_width}"
        )
    family = Domino(gru.emb_dim, gru.gru_hidden_dim, gru.pure_draft_prefix_len, gru.shift_label)
    return replace(body, family=family)


def rename(name: str) -> str:
    """The draft model's name of the checkpoint's tensor `name`."""
    return zlab.rename(name).removeprefix("logit_head.")
