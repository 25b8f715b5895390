"""What a DSpine draft learns beside causal blocks: its injection.

The codes are fixed: whitened rows of the target's LM head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sglang_dflash.model.injection import Injection


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
        self.injection = Injection(lm_head.shape[1], layers, rank, message)
        _begin(self.injection, directions)
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
        feature = self.injection.feature(hidden[:, :, 1:], layer)
        before = torch.cat([first.to(feature.dtype), feature[:, :, :-1]], dim=2)
        heard = self.injection.heard(hidden[:, :, 1:], feature, before, layer)
        return torch.cat([hidden[:, :, :1], hidden[:, :, 1:] + heard], dim=2)

    def forward(self, hidden: Tensor, base: Tensor, before: Tensor) -> tuple[Tensor, None]:
        """As `training.heads.Markov.forward`: the logits behind the token before each position."""
        feature = self.injection.feature(self._output, self._last)
        told = unit(self.transfer_codes[before])
        heard = self.injection.heard(self._output, feature, told, self._last)
        return F.linear(self.norm(self._output + heard), self._lm_head).float(), None


def _begin(injection: Injection, directions: Tensor) -> None:
    """The readouts begin with these directions, [H, R], and nothing is written."""
    for name, parameter in injection.named_parameters():
        if name.startswith("readouts"):
            parameter.data.copy_(directions.T)
        elif name.startswith(("writes", "predecessor_gate", "bias")):
            parameter.data.zero_()


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
