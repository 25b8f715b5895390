"""LiLiCorr checkpoints of NVIDIA's ModelOpt: z-lab's fields, those of the head, and convolutions.

SGLang 0.5.23 reads them in `models/lilicorr.py`. The convolutions are those of DFlash 2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from sglang_dflash.checkpoint.config import DFlashConfig, Shape
from sglang_dflash.checkpoint.fields import Flag, NumLayers, Place, Positive, PositiveNumber, Whole
from sglang_dflash.checkpoint.formats import zlab
from sglang_dflash.checkpoint.formats.dflash2 import (
    Convolutions,
    DFlash2,
    read_convolution,
)
from sglang_dflash.checkpoint.tensors import Tensors

FEATURES = 5  # of a candidate, beside its embedding
MOST_CANDIDATES = 16  # of a position, as in SGLang; all of a block attend to each other


class Head(Convolutions):
    """Fields beside z-lab's."""

    lilicorr_enabled: Flag = True
    lilicorr_candidate_topk: Annotated[int, Field(ge=1, le=MOST_CANDIDATES)]
    lilicorr_hidden_size: Whole
    lilicorr_num_layers: NumLayers
    lilicorr_num_heads: Positive
    lilicorr_mlp_ratio: PositiveNumber
    lilicorr_factor_dim: Positive
    lilicorr_vector_eps: PositiveNumber
    lilicorr_logit_scale: PositiveNumber


@dataclass(frozen=True)
class LiLiCorr(DFlash2):
    """A transformer over the candidates of all positions scores the pairs of neighbours."""

    name: ClassVar[str] = "LiLiCorr"
    module: ClassVar[str] = "lilicorr"

    top_k: int  # candidates of a position
    size: int  # of the transformer's hidden states, E
    num_layers: int
    num_heads: int
    mlp_size: int
    factors: int  # size of the vectors whose products are the scores
    vector_eps: float  # least norm of such a vector
    logit_scale: float  # of their products

    def shapes(self, draft: DFlashConfig) -> dict[str, Shape]:
        size, hidden, width = self.size, draft.hidden_size, draft.draft_width
        shapes: dict[str, Shape] = {
            "slot_embedding": (1, 1, width - 1, 1, size),
            "rank_embedding": (1, 1, 1, self.top_k, size),
            "relative_slot_bias": (self.num_heads, 2 * width - 1),
            "same_slot_bias": (self.num_heads,),
            "feature_norm.weight": (FEATURES,),
            "feature_norm.bias": (FEATURES,),
            "output_norm.weight": (size,),
            "anchor_norm.weight": (size,),
        }
        linear = {
            "pass_hidden_proj": (size, hidden),
            "context_proj": (size, hidden),
            "feature_mlp.up_proj": (size, FEATURES),
            "feature_mlp.down_proj": (size, size),
            "factor_input_proj": (size, 3 * size),
            "out_head": (self.factors, size),
            "in_head": (self.factors, size),
            "anchor_out_head": (self.factors, size),
        }
        if size != hidden:
            linear["token_proj"] = (size, hidden)
        for layer in range(self.num_layers):
            prefix = f"layers.{layer}."
            shapes[f"{prefix}attn.in_proj_weight"] = (3 * size, size)
            shapes[f"{prefix}attn.in_proj_bias"] = (3 * size,)
            shapes[f"{prefix}attn_norm.weight"] = shapes[f"{prefix}mlp_norm.weight"] = (size,)
            linear[f"{prefix}attn.out_proj"] = (size, size)
            linear[f"{prefix}mlp.up_proj"] = (self.mlp_size, size)
            linear[f"{prefix}mlp.down_proj"] = (size, self.mlp_size)
        for name, shape in linear.items():
            shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
        return {f"lilicorr.{name}": shape for name, shape in shapes.items()}

    def parts(self) -> list[str]:
        head = f"{self.top_k} candidates, {self.num_layers} layers of {self.size}"
        return [*super().parts(), f"transformer ({head})"]


def matches(raw: dict[str, Any]) -> bool:
    """Whether a config.json is of this format."""
    keys = {*raw, *(raw.get("dflash_config") or {})}
    return (
        "LiLiCorrDraftModel" in (raw.get("architectures") or ())
        or zlab.projector_type(raw) == "lilicorr"
        or any(key.startswith("lilicorr_") for key in keys)
    )


def read(raw: dict[str, Any], path: str, name: str, tensors: Tensors) -> DFlashConfig:
    """The configuration of a draft of this format. Raises `Refusal`, which names the field."""
    body, method = zlab.read_body(raw, path, name, tensors, Head)
    stated = method.read(Head)
    size = stated.lilicorr_hidden_size or body.hidden_size
    _check(method, stated, body, size)
    family = LiLiCorr(
        convolution=read_convolution(method, stated, body),
        selector=None,
        top_k=stated.lilicorr_candidate_topk,
        size=size,
        num_layers=stated.lilicorr_num_layers,
        num_heads=stated.lilicorr_num_heads,
        mlp_size=int(size * stated.lilicorr_mlp_ratio),
        factors=stated.lilicorr_factor_dim,
        vector_eps=stated.lilicorr_vector_eps,
        logit_scale=stated.lilicorr_logit_scale,
    )
    return replace(body, family=family)


def _check(place: Place, stated: Head, body: DFlashConfig, size: int) -> None:
    """Raise `Refusal` for a head that cannot be, or that SGLang's does not describe."""
    if not stated.lilicorr_enabled:
        raise place.refuse("has lilicorr_enabled = False, and a LiLiCorr draft needs its head")
    if size % stated.lilicorr_num_heads:
        raise place.refuse(
            f"has lilicorr_num_heads = {stated.lilicorr_num_heads}, which does not divide the "
            f"head's hidden size {size}"
        )
    if stated.lilicorr_candidate_topk > body.vocab_size:
        raise place.refuse(
            f"has lilicorr_candidate_topk = {stated.lilicorr_candidate_topk}, which is more than "
            f"vocab_size = {body.vocab_size}"
        )
    if body.sample_from_anchor:
        raise place.refuse(
            "has sample_from_anchor, and the anchor of a LiLiCorr draft predicts nothing"
        )
    if body.draft_vocab_size not in (None, body.vocab_size):
        raise place.refuse(
            "has a smaller vocabulary than its target, which a LiLiCorr draft cannot"
        )
    if body.logit_multiplier != 1.0 or body.logit_cap is not None:
        raise place.refuse(
            "has output_multiplier or final_logit_softcapping, and LiLiCorr has not said how its "
            "probabilities follow them"
        )


def rename(name: str) -> str:
    """The draft model's name of the checkpoint's tensor `name`."""
    return zlab.rename(name)
