"""The draft sees only the last --speculative-draft-window-size tokens of the context."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from torch import Tensor

from sglang_dflash.step.reservation import ceil_align


class DraftWindow:
    """Rows of the draft's own: the last `window` slots of the context, then the block's.

    Slots and RoPE positions are still the target's. A row begins at a page boundary, because paged
    attention needs this. So the draft sees up to `page_size - 1` more tokens.
    """

    def __init__(
        self, target: ReqToTokenPool, window: int, block_size: int, page_size: int, exact: bool
    ) -> None:
        """exact: the host's lengths are always the true ones."""
        width = ceil_align(window + page_size, page_size) + block_size
        rows = len(target.req_to_token) - 1  # of a decode server: also of requests on their way
        self.pool = ReqToTokenPool(rows, width, target.device, enable_memory_saver=False)
        self._target = target
        self._window = window
        self._page_size = page_size
        self._block_size = block_size
        self._exact = exact

    def lens(self, rows: Tensor, seq_lens: Tensor, seq_lens_cpu: Tensor) -> tuple[Tensor, Tensor]:
        """Fill these rows. Returns their lengths on the device and bounds of them on the host.

        All [B] int64; seq_lens_cpu may exceed the true lengths, unless they are exact.
        """
        start = self._start(seq_lens)
        table = self._target.req_to_token
        width = min(self.pool.req_to_token.shape[1], table.shape[1])
        columns = start[:, None] + torch.arange(width, device=start.device)
        columns.clamp_(max=table.shape[1] - 1)  # after the block: never read
        self.pool.req_to_token[rows, :width] = table[rows[:, None], columns]
        if self._exact:
            return seq_lens - start, seq_lens_cpu - self._start(seq_lens_cpu)
        return seq_lens - start, seq_lens_cpu.clamp(max=self._window + self._page_size - 1)

    def _start(self, seq_lens: Tensor) -> Tensor:
        return (seq_lens - self._window).clamp(min=0) // self._page_size * self._page_size
