"""Drafts of DeepSpec's own class on random weights: `python -m test.oracles.dspark`.

Needs the source tree of github.com/deepseek-ai/DeepSpec on PYTHONPATH. The fixture was written at
its commit afdfa7c with Transformers 5.8.1 and PyTorch 2.11, in fp32.
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
    """The drafts behind each context, whose last token is the anchor, and their confidences."""
    from deepspec.modeling.dspark.qwen3.modeling import Qwen3DSparkModel

    config, weights, semantics = CASES[case]()
    described = {k: v for k, v in config.items() if k != "architectures"}
    described |= {"layer_types": ["full_attention"] * config["num_hidden_layers"]}
    model = Qwen3DSparkModel(Qwen3Config(**described, attn_implementation="sdpa")).eval()
    weights["embed_tokens.weight"] = target.get_input_embeddings().weight
    weights["lm_head.weight"] = target.get_output_embeddings().weight
    model.load_state_dict(weights)
    return [_block(model, target, semantics, ids) for ids in contexts]


def _block(model: Any, target: Qwen3ForCausalLM, s: Semantics, ids: list[int]) -> dict[str, Any]:
    size = s.block_size
    block = torch.tensor([[ids[-1]] + [s.mask_token_id] * (size - 1)])
    hidden = model._forward_backbone(
        target_hidden_states=features(target, ids[:-1], s.hidden_state_ids)[None],
        noise_embedding=model.embed_tokens(block),
        position_ids=torch.arange(len(ids) - 1 + size)[None],
        attention_mask=None,
        is_causal=False,
    )
    drafts, _ = model.sample_draft_tokens(
        model.compute_logits(hidden),
        first_prev_token_ids=block[:, 0],
        temperature=0.0,
        hidden_states=hidden,
    )
    before = torch.cat([block[:, :1], drafts[:, :-1]], dim=1)
    logits = model.predict_confidence_step(hidden, before)
    confidences = [] if logits is None else logits.flatten().sigmoid().tolist()
    return {"drafts": drafts[0].tolist(), "confidences": [round(c, 5) for c in confidences]}


if __name__ == "__main__":
    written("dspark", FAMILIES["dspark"], draft)
