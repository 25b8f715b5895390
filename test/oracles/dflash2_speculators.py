"""Drafts of speculators' own DFlash 2 class: `python -m test.oracles.dflash2_speculators`.

Needs the package speculators on PYTHONPATH. The fixture was written with its version 0.9.0,
Transformers 5.8.1 and PyTorch 2.11, in fp32. The class is a trainer: it drafts a block behind one
anchor of a sequence, and its selector scores the candidates of a position. The walk is the
script's own. The package `hs_connectors`, which moves training data, is not needed.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from test.formats import CASES
from test.oracles.fixture import FAMILIES, written
from test.reference import Semantics, features


def _without_connectors() -> None:
    """Let speculators import without the package that moves training data."""
    connectors: Any = ModuleType("hs_connectors")
    for name in ("FileTransfer", "HiddenStatesTransfer", "HiddenStatesBackend"):
        setattr(connectors, name, type(name, (), {}))
    sys.modules.setdefault("hs_connectors", connectors)


@torch.no_grad()
def draft(target: Qwen3ForCausalLM, case: str, contexts: list[list[int]]) -> list[dict[str, Any]]:
    """The drafts behind each context, whose last token is the anchor, and their weights."""
    _without_connectors()
    from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig

    config, weights, semantics = CASES[case]()
    described = {k: v for k, v in config.items() if k != "speculators_config"}
    read = DFlash2SpeculatorConfig(**described)
    read.transformer_layer_config._attn_implementation = "eager"
    model = DFlash2DraftModel(read).eval()
    weights["embed_tokens.weight"] = target.get_input_embeddings().weight
    weights["lm_head.weight"] = target.get_output_embeddings().weight
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= {"verifier_norm.weight", "verifier_lm_head.weight"}
    assert not unexpected
    return [_block(model, target, semantics, ids) for ids in contexts]


def _block(model: Any, target: Qwen3ForCausalLM, s: Semantics, ids: list[int]) -> dict[str, Any]:
    behind = [s.mask_token_id] * s.block_size  # no position sees them
    states = features(target, ids + behind, s.hidden_state_ids)[None]
    is_anchor = torch.zeros(1, states.shape[1])
    is_anchor[0, len(ids) - 1] = 1
    hidden, logits, *_ = model._backbone_forward(
        hidden_states=states,
        input_ids=torch.tensor([ids + behind]),
        loss_mask=is_anchor,
        verifier_last_hidden_states=torch.zeros(1, states.shape[1], model.hidden_size),
        document_ids=torch.zeros(1, states.shape[1], dtype=torch.int64),
        max_anchors=1,
    )
    token, drafts, weights = ids[-1], [], []
    for position in range(0 if s.sample_from_anchor else 1, s.block_size):
        at = slice(position, position + 1)
        found = model.candidate_selector.select(
            logits[:, at], hidden[:, at], torch.tensor([[token]])
        )
        candidates, scores = (values[0, 0] for values in found)
        token = int(candidates[scores.argmax()])
        drafts.append(token)
        weights.append(round(float(scores.softmax(dim=0).amax()), 5))
    return {"drafts": drafts, "confidences": weights}


if __name__ == "__main__":
    written("dflash2_speculators", FAMILIES["dflash2_speculators"], draft)
