"""Drafts of other families for the bundled target: the bundled draft, and heads beside its weights.

`python -m training.families --out DIR` writes them all. `training.heads` trains the heads.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from sglang_dflash.checkpoint.formats.lilicorr import LiLiCorr
from sglang_dflash.tiny import DRAFT
from training.causal import merged
from training.export import write_checkpoint

HEADS = Path(__file__).with_name("trained")  # a file per family: its own tensors only
RANK = 32  # of the Markov head, of the candidate selector, and of Domino's correction
GRU_SIZE = 64
TAPS, GROUP = 2, 16  # of the convolutions
LOW_RANK = 16  # of the changes that make the bundled draft causal
MESSAGE = 48  # of DSpine's injection
CODE = 64  # of a token, there
CANDIDATES = LiLiCorr(
    convolution=None,
    selector=None,
    top_k=8,
    size=96,
    num_layers=1,
    num_heads=4,
    mlp_size=192,
    factors=48,
    vector_eps=1e-6,
    logit_scale=16.0,
)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # architecture, fields of `dflash_config`
    "dspark": (
        "DSparkDraftModel",
        {
            "projector_type": "dspark",
            "markov_rank": RANK,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "sample_from_anchor": False,
        },
    ),
    "dflash2": (
        "DFlash2DraftModel",
        {
            "conv_kernel_size": TAPS,
            "conv_group_size": GROUP,
            "selector_rank": RANK,
            "selector_top_k": 16,
        },
    ),
    "domino": (
        "DominoDraftModel",
        {
            "projector_type": "domino",
            "emb_dim": RANK,
            "gru_hidden_dim": GRU_SIZE,
            "pure_draft_prefix_len": 0,
            "shift_label": False,
        },
    ),
    "jetspec": ("DFlashDraftModel", {"causal_head": True}),
    "dspine": ("DSpineDraftModel", {"causal": True}),
    "lilicorr": (
        "LiLiCorrDraftModel",
        {
            "projector_type": "lilicorr",
            "lilicorr_candidate_topk": CANDIDATES.top_k,
            "lilicorr_hidden_size": CANDIDATES.size,
            "lilicorr_num_layers": CANDIDATES.num_layers,
            "lilicorr_num_heads": CANDIDATES.num_heads,
            "lilicorr_mlp_ratio": CANDIDATES.mlp_size / CANDIDATES.size,
            "lilicorr_factor_dim": CANDIDATES.factors,
            "lilicorr_vector_eps": CANDIDATES.vector_eps,
            "lilicorr_logit_scale": CANDIDATES.logit_scale,
        },
    ),
}
AT_TOP = {
    "dspine": {"dspine_config": {"transfer_rank": CODE, "message_size": MESSAGE, "top_k": 16}}
}


def assemble(family: str, folder: Path, heads: Path | None = None) -> Path:
    """Write a draft of this family to folder/family, and return that folder.

    heads: its tensors. None: those in `HEADS`.
    """
    weights: dict[str, Tensor] = load_file(DRAFT / "model.safetensors")
    weights = merged(weights | load_file(heads or HEADS / f"{family}.safetensors"))
    architecture, fields = FAMILIES[family]
    config = json.loads((DRAFT / "config.json").read_text())
    method = config["dflash_config"] | fields
    config |= {"architectures": [architecture], "dflash_config": method} | AT_TOP.get(family, {})
    return write_checkpoint(folder / family, config, weights)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training.families", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    for family in FAMILIES:
        print(assemble(family, args.out))


if __name__ == "__main__":
    main()
