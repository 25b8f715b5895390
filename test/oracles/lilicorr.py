"""Drafts of SGLang's own LiLiCorr head on random weights: `python -m test.oracles.lilicorr`.

Needs SGLang 0.5.23, and the source tree of github.com/sgl-project/SpecForge (November 2026) on
PYTHONPATH, whose DFlash class is the body. The fixture was written with Transformers 5.19 and
PyTorch 2.14, in fp32.
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
    from sglang.srt.models.lilicorr import LiLiCorrHead
    from sglang.srt.speculative.lilicorr_utils import parse_lilicorr_draft_config
    from specforge.modeling.draft.dflash import DFlashDraftModel

    config, weights, semantics = CASES[case]()
    described = {k: v for k, v in config.items() if k != "architectures"}
    described |= {"layer_types": ["full_attention"] * config["num_hidden_layers"]}
    qwen = Qwen3Config(**described, attn_implementation="sdpa")
    body = DFlashDraftModel(qwen).eval()
    body.load_state_dict({k: v for k, v in weights.items() if not k.startswith("lilicorr.")})
    head = LiLiCorrHead(
        model_hidden_size=qwen.hidden_size,
        block_size=semantics.block_size,
        rms_norm_eps=qwen.rms_norm_eps,
        config=parse_lilicorr_draft_config(draft_hf_config=qwen),
    )
    prefix = "lilicorr."
    own = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
    head.load_state_dict(own)
    head.materialize_inference_buffers(torch.device("cpu"), torch.float32)
    return [_block(body, head, target, semantics, ids) for ids in contexts]


def _block(
    body: Any, head: Any, target: Qwen3ForCausalLM, s: Semantics, ids: list[int]
) -> dict[str, Any]:
    block = torch.tensor([[ids[-1]] + [s.mask_token_id] * (s.block_size - 1)])
    context = features(target, ids[:-1], s.hidden_state_ids)[None]
    hidden = body(
        position_ids=torch.arange(len(ids) - 1 + s.block_size)[None],
        noise_embedding=target.get_input_embeddings()(block),
        target_hidden=context,
    )[:, 1:]
    log_probs = target.get_output_embeddings()(hidden).log_softmax(dim=-1)
    log_probs, candidates = log_probs.topk(head.candidate_topk, dim=-1)
    given = {
        "token_embeddings": target.get_input_embeddings()(candidates),
        "candidate_log_probs": log_probs,
        "pass_hidden": hidden,
        "anchor_hidden": body.hidden_norm(body.fc(context))[:, -1],
        "anchor_valid": torch.tensor([True]),
    }
    first = torch.tensor([0.0])
    drafts, _ = head.select_with_proposal(
        candidate_tokens=candidates,
        uniforms=first.expand(1, s.block_size - 1),
        temperatures=first + 1,
        greedy_mask=first == 0,
        **given,
    )
    start, pairs = head.log_factors(
        *head.score(**{name: value[:, None] for name, value in given.items()})
    )
    weights, row = [], start[0, 0]
    for position, token in enumerate(drafts[0].tolist()):
        at = int(row.argmax())
        assert int(candidates[0, position, at]) == token
        weights.append(round(float(row.softmax(dim=-1).amax()), 5))
        if position + 1 < drafts.shape[1]:
            row = pairs[0, 0, position, at]
    return {"drafts": drafts[0].tolist(), "confidences": weights}


if __name__ == "__main__":
    written("lilicorr", FAMILIES["lilicorr"], draft)
