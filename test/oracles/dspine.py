"""Drafts of SpecForge's own class on random weights: `python -m test.oracles.dspine`.

Needs the source tree of github.com/sgl-project/SpecForge (November 2026) on PYTHONPATH. The fixture
was written with Transformers 5.8.1 and PyTorch 2.11, in fp32.
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
    from specforge.modeling.draft.dspine import DSpineDraftModel

    config, weights, semantics = CASES[case]()
    described = {k: v for k, v in config.items() if k != "architectures"}
    described |= {"layer_types": ["full_attention"] * config["num_hidden_layers"]}
    model = DSpineDraftModel(Qwen3Config(**described, attn_implementation="sdpa")).eval()
    model.load_state_dict(weights)
    return [_block(model, target, semantics, ids) for ids in contexts]


def _block(model: Any, target: Qwen3ForCausalLM, s: Semantics, ids: list[int]) -> dict[str, Any]:
    size, context = s.block_size, len(ids) - 1
    block = torch.tensor([[ids[-1]] + [s.mask_token_id] * (size - 1)])
    keys, queries = torch.arange(context + size), torch.arange(size)[:, None]
    output = model(
        position_ids=keys[None],
        attention_mask=((keys < context) | (keys - context <= queries))[None, None],
        noise_embedding=target.get_input_embeddings()(block),
        target_hidden=features(target, ids[:-1], s.hidden_state_ids)[None],
        block_token_ids=block[:, None],
    )
    head = target.get_output_embeddings().weight
    logits = output.hidden_states[:, :, 1:] @ head.T
    candidates = logits.topk(model.dspine_config.top_k, dim=-1).indices
    states = output.pre_injection[:, :, 1:]
    scores = model.transition_scores(states, candidates, block[:, :1], head)
    drafts = model.select_cached(scores, candidates)[0, 0].tolist()
    weights, at = [], 0  # of each draft among the candidates behind the one before
    for position, draft in enumerate(drafts):
        row = scores[0, 0, position, at]
        at = int(row.argmax())
        assert int(candidates[0, 0, position, at]) == draft
        weights.append(round(float(row.softmax(dim=-1).amax()), 5))
    return {"drafts": drafts, "confidences": weights}


if __name__ == "__main__":
    written("dspine", FAMILIES["dspine"], draft)
