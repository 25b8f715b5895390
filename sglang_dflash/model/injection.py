"""DSpine's injection in plain PyTorch: what a position hears from the one before it.

The rules are those of SpecForge's `modeling/draft/dspine.py`. A position tells its feature, which
has the rank of a token's code. What a position hears is added to the layer's output, in proportion
to the norm of it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TINY = 1e-24  # the reference bounds a norm by its root


class Injection(nn.Module):
    """The parts of a checkpoint under `injection`."""

    def __init__(self, hidden: int, layers: int, rank: int, message: int) -> None:
        """hidden: H; layers: of the draft; rank: R, of what is told; message: of what is heard."""
        super().__init__()

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        self.readouts = nn.ModuleList(linear(hidden, rank) for _ in range(layers))
        self.writes = nn.ModuleList(linear(message, hidden) for _ in range(layers))
        self.message = linear(rank, message)
        self.receiver_gate = linear(rank, message)
        self.predecessor_gate = linear(rank, message)
        self.bias = nn.Parameter(torch.empty(message))
        self._rank = rank

    def feature(self, hidden: Tensor, layer: int) -> Tensor:
        """What positions tell, of the norm sqrt(R): [.., H] -> [.., R]."""
        told = self.readouts[layer](hidden).float()
        return F.rms_norm(told, (self._rank,), eps=TINY).to(hidden.dtype)

    def heard(self, hidden: Tensor, feature: Tensor, before: Tensor, layer: int) -> Tensor:
        """What is added to positions: [.., H].

        hidden: [.., H]; feature: [.., R], theirs; before: [.., R], of the positions before them.
        """
        gate = self.receiver_gate(feature) + self.predecessor_gate(before) + self.bias
        written: Tensor = self.writes[layer](gate.sigmoid() * self.message(before))
        size = torch.linalg.vector_norm(hidden.float(), dim=-1, keepdim=True)
        scale: Tensor = size * hidden.shape[-1] ** -0.5
        return scale.to(hidden.dtype) * written
