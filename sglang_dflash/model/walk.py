"""The walk from candidate to candidate: each draft is chosen by the draft before it.

The scores of all pairs of neighbouring candidates are known at once. So what follows one after
another is a look-up for each position.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dflash.kernels import Kernels
from sglang_dflash.method.noise import DraftNoise
from sglang_dflash.model.lm_head import Prediction


def walk(
    kernels: Kernels, ids: Tensor, scores: Tensor, return_probs: bool, noise: DraftNoise
) -> Prediction:
    """The drafts of B blocks, S each. A draft's probability is its weight among the candidates.

    ids: [B, S, k] int64, candidates; scores: [B, S, k, k] float32, of each candidate (last) behind
    each candidate of the position before. All those before the first position are the anchor.
    """
    gumbel = kernels.gumbel(noise, ids.contiguous())[:, None, :, None]
    noisy = scores[:, None] + noise.scales()[:, :, None, None, None] * gumbel  # [B, C, S, k, k]
    best = noisy.argmax(dim=4)  # [B, C, S, k]: the choice after each token before
    chosen = _of_choice(best, noise.choices)  # [B, S, k]
    at = ids.new_zeros(len(ids), 1)
    path = [at]
    for position in range(chosen.shape[1]):
        at = chosen[:, position].gather(1, at)
        path.append(at)
    taken = torch.cat(path, dim=1)[:, :-1]  # [B, S], the token before each draft
    after = taken[:, None, :, None].expand(-1, best.shape[1], -1, 1)
    picks = ids[:, None].expand_as(best).gather(3, best.gather(3, after))  # [B, C, S, 1]
    picks = torch.cat([picks, _of_choice(picks, noise.choices)[:, None]], dim=1)
    picks = picks.squeeze(3).transpose(1, 2).flatten(0, 1)  # [B * S, C + 1]
    if not return_probs:
        return Prediction(picks, None)
    after = taken[:, :, None, None].expand(-1, -1, 1, ids.shape[2])
    scores = _of_choice(noisy, noise.choices).gather(2, after)  # [B, S, 1, k]
    return Prediction(picks, scores.softmax(dim=3).amax(dim=3).flatten())


def before_each(ids: Tensor, anchors: Tensor) -> Tensor:
    """The tokens that may be before each candidate: [B, S, k].

    ids: [B, S, k] int64, candidates; anchors: [B, 1] int64.
    """
    return torch.cat([anchors[:, :, None].expand_as(ids[:, :1]), ids[:, :-1]], dim=1)


def _of_choice(values: Tensor, choices: Tensor) -> Tensor:
    """The values at each request's share: [B, C, ..] -> [B, ..]."""
    index = choices.view(-1, *(1,) * (values.dim() - 1)).expand(-1, 1, *values.shape[2:])
    return values.gather(1, index).squeeze(1)
