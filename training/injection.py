"""DSpine's injection in plain PyTorch, for training: what a position hears from the one before it.

The codes are fixed: whitened rows of the target's LM head. The readouts begin with the directions
of the whitening, and the writes begin with zero.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Injection(nn.Module):
    """The parts of a checkpoint under `injection`."""

    def __init__(self, directions: Tensor, layers: int, message: int) -> None:
        """directions: [H, R], of the whitening."""
        super().__init__()
        hidden, rank = directions.shape

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        readouts = [linear(hidden, rank) for _ in range(layers)]
        writes = [linear(message, hidden) for _ in range(layers)]
        self.readouts, self.writes = nn.ModuleList(readouts), nn.ModuleList(writes)
        self.message = linear(rank, message)
        self.receiver_gate = linear(rank, message)
        self.predecessor_gate = linear(rank, message)
        self.bias = nn.Parameter(torch.zeros(message))
        for readout, write in zip(readouts, writes, strict=True):
            readout.weight.data.copy_(directions.T)
            nn.init.zeros_(write.weight)
        nn.init.zeros_(self.predecessor_gate.weight)

    def told(self, hidden: Tensor, layer: int) -> Tensor:
        """[.., H] -> [.., R], of the norm sqrt(R)."""
        return unit(self.readouts[layer](hidden))

    def hear(self, hidden: Tensor, before: Tensor, layer: int) -> Tensor:
        """[.., H]. hidden: [.., H]; before: [.., R], what the positions before tell."""
        gate = self.receiver_gate(self.told(hidden, layer)) + self.predecessor_gate(before)
        message = (gate + self.bias).sigmoid() * self.message(before)
        size: Tensor = hidden.norm(dim=-1, keepdim=True) / hidden.shape[-1] ** 0.5
        heard: Tensor = hidden + size * self.writes[layer](message)
        return heard


def unit(vectors: Tensor) -> Tensor:
    """Scale to the norm of the root of their length."""
    scaled: Tensor = vectors.shape[-1] ** 0.5 * F.normalize(vectors, dim=-1)
    return scaled


class Spine(nn.Module):
    """DSpine: the injection after each layer, and after the last one by the true token before."""

    transfer_codes: Tensor

    def __init__(self, lm_head: Tensor, rank: int, message: int, layers: int) -> None:
        """lm_head: [V, H] float32."""
        super().__init__()
        codes, directions = whitened(lm_head, rank)
        self.injection = Injection(directions, layers, message)
        self.register_buffer("transfer_codes", codes)
        self.register_buffer("transfer_ready", torch.tensor(True))
        self._last = layers - 1
        self._lm_head = lm_head.detach()  # no parameter of this module
        self.norm: Callable[[Tensor], Tensor]  # the draft's; set before the first forward
        self._output: Tensor  # of the last layer, before it is added to

    def after_layer(self, layer: int, hidden: Tensor, tokens: Tensor) -> Tensor:
        """[B, A, N, H], as `hidden`. tokens: [B, A, N] int64, of which anchors are known."""
        if layer == self._last:
            self._output = hidden[:, :, 1:].float()
        first = unit(self.transfer_codes[tokens[:, :, :1]])
        told = torch.cat([first, self.injection.told(hidden[:, :, 1:-1], layer)], dim=2)
        heard = self.injection.hear(hidden[:, :, 1:], told, layer)
        return torch.cat([hidden[:, :, :1], heard], dim=2)

    def forward(self, hidden: Tensor, base: Tensor, before: Tensor) -> tuple[Tensor, None]:
        """As `training.heads.Markov.forward`: the logits behind the token before each position."""
        told = unit(self.transfer_codes[before])
        refined = self.norm(self.injection.hear(self._output, told, self._last))
        return F.linear(refined, self._lm_head).float(), None


def whitened(lm_head: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Codes of tokens, [V, R] of norm 1, and the directions that they are made of, [H, R].

    SpecForge's rule: the rows of the head, of norm 1 and centred, along their principal directions,
    each of which gets the same variance.
    """
    rows = F.normalize(lm_head.float(), dim=1)
    rows = rows - rows.mean(dim=0)
    variances, directions = torch.linalg.eigh(rows.T @ rows)
    variances, directions = variances[-rank:], directions[:, -rank:]
    return F.normalize(rows @ directions / variances.sqrt(), dim=1), directions
