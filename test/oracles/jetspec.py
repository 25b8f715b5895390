"""Drafts of JetSpec's own class on random weights, as a chain: `python -m test.oracles.jetspec`.

Needs the source tree of github.com/hao-ai-lab/JetSpec (2c7b3fa, June 2026) on PYTHONPATH. The
fixture was written with Transformers 5.8.1 and PyTorch 2.11, in fp32. The class runs without a
cache.
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
    """The drafts behind each context, whose last token is the anchor, and their probabilities."""
    from jetspec.models.draft_head import DFlashDraftModel

    config, weights, semantics = CASES[case]()
    described = {k: v for k, v in config.items() if k != "architectures"}
    described |= {"layer_types": ["full_attention"] * config["num_hidden_layers"]}
    model = DFlashDraftModel(Qwen3Config(**described, attn_implementation="sdpa")).eval()
    model.load_state_dict(weights)
    return [_block(model, target, semantics, ids) for ids in contexts]


def _block(model: Any, target: Qwen3ForCausalLM, s: Semantics, ids: list[int]) -> dict[str, Any]:
    block = torch.tensor([[ids[-1]] + [s.mask_token_id] * (s.block_size - 1)])
    hidden = model(
        position_ids=torch.arange(len(ids) - 1 + s.block_size)[None],
        noise_embedding=target.get_input_embeddings()(block),
        target_hidden=features(target, ids[:-1], s.hidden_state_ids)[None],
    )[0, 1:]
    probabilities = target.get_output_embeddings()(hidden).softmax(dim=-1)
    best, drafts = probabilities.max(dim=-1)
    return {"drafts": drafts.tolist(), "confidences": [round(p, 5) for p in best.tolist()]}


if __name__ == "__main__":
    written("jetspec", FAMILIES["jetspec"], draft)
