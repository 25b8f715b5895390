"""Causal blocks for the bundled draft, whose own are not: a change of low rank to its matrices.

So the trained file of a family stays small. `merged` puts the change into the draft's weights.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from training.draft_model import Draft, Layer

UP, DOWN = ".up", ".down"  # of the two factors, behind the name of the weight
PARAMETER = re.compile(r"\.parametrizations\.weight\.0(\.\w+)$")


class LowRank(nn.Module):
    """A weight and what is added to it, at first nothing."""

    def __init__(self, outputs: int, inputs: int, rank: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(outputs, rank))
        self.down = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def make_causal(draft: Draft, rank: int) -> None:
    """Make a frozen draft's blocks causal, and let low-rank changes of its matrices learn."""
    for module in list(draft.modules()):
        if isinstance(module, nn.Linear):
            change = LowRank(module.out_features, module.in_features, rank)
            parametrize.register_parametrization(module, "weight", change)
        if isinstance(module, Layer):
            module.causal = True


def short_name(parameter: str) -> str:
    """The name of a factor in the trained file."""
    return PARAMETER.sub(r".weight\1", parameter)


def merged(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights with their changes of low rank put into them, in their own dtype."""
    changed = {name: w for name, w in weights.items() if not name.endswith((UP, DOWN))}
    for name in [name.removesuffix(UP) for name in weights if name.endswith(UP)]:
        change = weights[name + UP].float() @ weights[name + DOWN].float()
        changed[name] = (weights[name].float() + change).to(weights[name].dtype)
    return changed
