"""Drafts of z-lab's own DFlash 2 class on random weights: `python -m test.oracles.dflash2`.

Needs z-lab's package `dflash` on PYTHONPATH. The fixture was written with its version 0.1.0,
Transformers 5.8.1 and PyTorch 2.11, in fp32. The class runs without a cache.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from test.formats import CASES
from test.oracles.fixture import FAMILIES, written
from test.reference import Semantics, features


@torch.no_grad()
def draft(target: Qwen3ForCausalLM, case: str, contexts: list[list[int]]) -> list[dict[str, Any]]:
    """The drafts behind each context, whose last token is the anchor, and their weights."""
    from dflash.model import DFlash2DraftModel

    config, weights, semantics = CASES[case]()
    described = {"layer_types": ["full_attention"] * config["num_hidden_layers"]} | config
    model = DFlash2DraftModel(Qwen3Config(**described)).eval()
    model.load_state_dict(
        {(f"{k}.weight" if k.endswith("_codebook") else k): w for k, w in weights.items()}
    )
    return [_block(model, target, semantics, ids) for ids in contexts]


def _block(model: Any, target: Qwen3ForCausalLM, s: Semantics, ids: list[int]) -> dict[str, Any]:
    block = torch.tensor([[ids[-1]] + [s.mask_token_id] * (model.block_size - 1)])
    scale = model.config.dflash_config.get("input_embedding_scale", 1.0)
    hidden = model(
        target_hidden=features(target, ids[:-1], s.hidden_state_ids)[None],
        noise_embedding=target.get_input_embeddings()(block) * scale,
        position_ids=torch.arange(len(ids) - 1 + model.block_size)[None],
    )[:, 1:]
    drafts, *_ = model.propose(hidden, block[:, 0], target.lm_head, 0.0)
    weights = _weights(model, hidden, block[:, 0], drafts, target)
    return {"drafts": drafts[0].tolist(), "confidences": [round(w, 5) for w in weights]}


def _weights(
    model: Any, hidden: torch.Tensor, anchor: torch.Tensor, drafts: torch.Tensor, target: Any
) -> list[float]:
    """Each draft's weight: the probabilities of the class at temperature 1, along the same path."""
    from dflash import model as module

    drawn, module._sample_probs = module._sample_probs, lambda probs: probs.argmax(dim=-1)
    try:
        path, _, probabilities = model.propose(hidden, anchor, target.lm_head, 1.0)
    finally:
        module._sample_probs = drawn
    assert torch.equal(path, drafts)
    weights: list[float] = probabilities[0].amax(dim=-1).tolist()
    return weights


if __name__ == "__main__":
    written("dflash2", FAMILIES["dflash2"], draft)
