"""Drafts of SpecForge's own class on random weights: `python -m test.oracles.domino`.

Needs the source tree of github.com/sgl-project/SpecForge (0.2.0) on PYTHONPATH. The fixture was
written with Transformers 5.8.1 and PyTorch 2.11, in fp32.
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
    from specforge.modeling.draft.domino import DominoDraftModel

    config, weights, semantics = CASES[case]()
    described = {k: v for k, v in config.items() if k != "architectures"}
    described |= {"layer_types": ["full_attention"] * config["num_hidden_layers"]}
    model = DominoDraftModel(Qwen3Config(**described, attn_implementation="sdpa")).eval()
    model.load_state_dict(weights)
    return [_block(model, target, semantics, ids) for ids in contexts]


def _block(model: Any, target: Qwen3ForCausalLM, s: Semantics, ids: list[int]) -> dict[str, Any]:
    size = s.block_size
    block = torch.tensor([[ids[-1]] + [s.mask_token_id] * (size - 1)])
    embed = target.get_input_embeddings()
    hidden = model(
        position_ids=torch.arange(len(ids) - 1 + size)[None],
        noise_embedding=embed(block),
        target_hidden=features(target, ids[:-1], s.hidden_state_ids)[None],
        is_causal=False,
    )
    drafts = model._sample_draft_tokens(target, hidden, block)
    # The probability of each draft: that of its corrected logits.
    logits = model.apply_logits_head(
        target.get_output_embeddings()(hidden)[:, None],
        prev_token_embeddings=embed(torch.cat([block[:, :1], drafts], dim=1))[:, None],
        hidden_states=hidden[:, None],
    )[0, 0]
    logits = logits[:-1] if model.shift_label else logits[1:]
    assert logits.argmax(dim=-1).tolist() == drafts[0].tolist()
    best = logits.softmax(dim=-1).amax(dim=-1).tolist()
    return {"drafts": drafts[0].tolist(), "confidences": [round(p, 5) for p in best]}


if __name__ == "__main__":
    written("domino", FAMILIES["domino"], draft)
