"""DFlash 2: causal convolutions along the block, before and after a sublayer.

The rule is that of z-lab's `dflash/model.py`. A kernel is a trained one plus one that is projected
from the sublayer's normed input and shared by the channels of a group. Nothing crosses the bounds
of a block, so a convolution keeps nothing between steps. The context is not convolved.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sglang_dflash.checkpoint.config import Convolution


class BlockConvolution(nn.Module):
    """The convolutions of one sublayer."""

    def __init__(self, hidden_size: int, convolution: Convolution) -> None:
        super().__init__()
        self.width = 0  # positions of a block; set before the first forward
        self._taps, self._group = convolution.taps, convolution.group
        self._groups = hidden_size // convolution.group
        # The first dimension: before the sublayer, after it.
        self.base_kernel = nn.Parameter(torch.empty(2, self._taps, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * self._taps * self._groups, bias=False)

    def kernels(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The kernels before and after the sublayer: [B, N, taps, groups, channels of a group].

        hidden: [n, H], the sublayer's normed input, of whole blocks.
        """
        by_group = 2, self._taps, self._groups
        of_hidden = self.kernel_projection(hidden).view(-1, self.width, *by_group, 1)
        before, after = (self.base_kernel.view(*by_group, self._group) + of_hidden).unbind(2)
        return before, after

    def convolve(self, hidden: Tensor, kernel: Tensor) -> Tensor:
        """Convolve whole blocks, [n, H], by one of `kernels`."""
        blocks = hidden.view(-1, self.width, self._groups, self._group)
        output = kernel[:, :, 0] * blocks
        for tap in range(1, min(self._taps, self.width)):
            output[:, tap:].addcmul_(kernel[:, tap:, tap], blocks[:, :-tap])
        return output.view(hidden.shape)
