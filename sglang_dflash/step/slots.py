"""KV slots after every request for its next blocks. One allocation serves both pools."""

from __future__ import annotations

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from torch import Tensor

from sglang_dflash.step.copies import to_device
from sglang_dflash.step.reservation import ceil_align, reserved_end


class Slots:
    """Reserves KV slots for the requests of a batch, from the target's allocator."""

    def __init__(
        self, pool: ReqToTokenPool, allocator: BaseTokenToKVPoolAllocator, count: int
    ) -> None:
        """count: tokens that must fit after the committed ones."""
        pool.dflash_slots = self  # for `hooks.tokens_for_next_decode`
        self.table = pool.req_to_token  # [rows, context_len + reserve] int32
        self._allocator = allocator
        self._count = count
        self._page_size = allocator.page_size

    def reserve(self, reqs: list[Req]) -> None:
        """Give every request its slots.

        Before each decode step, the scheduler calls `ScheduleBatch.check_decode_mem`. This makes
        sure that there is enough memory, by `hooks.tokens_for_next_decode`.
        """
        short = [req for req in reqs if req.kv_allocated_len < req.kv_committed_len + self._count]
        if not short:
            return
        have = [req.kv_allocated_len for req in short]
        want = [self._reserved_end(req.kv_committed_len) for req in short]
        slots = self._alloc([req.req_pool_idx for req in short], have, want)
        assert slots is not None, "a step began without the memory that check_decode_mem promises"
        sizes = [end - start for start, end in zip(have, want, strict=True)]
        for req, end, part in zip(short, want, slots.split(sizes), strict=True):
            self.table[req.req_pool_idx, req.kv_allocated_len : end] = part
            req.kv_allocated_len = end

    def needed(self, reqs: list[Req]) -> int:
        """Tokens that `reserve` will take from the allocator, in whole pages."""
        tokens = 0
        for req in reqs:
            end = self._reserved_end(req.kv_committed_len)
            if end > req.kv_allocated_len:
                tokens += ceil_align(end, self._page_size)
                tokens -= ceil_align(req.kv_allocated_len, self._page_size)
        return tokens

    def _reserved_end(self, committed: int) -> int:
        return reserved_end(committed, self._count, self._page_size, self.table.shape[1])

    def _alloc(self, rows: list[int], have: list[int], want: list[int]) -> Tensor | None:
        """Slots that extend these rows from `have` to `want` positions, row after row."""
        count = sum(want) - sum(have)
        slots: Tensor | None
        if self._page_size == 1:
            slots = self._allocator.alloc(count)
            return slots
        start, end = torch.tensor(have), torch.tensor(want)
        row, start_on_device, end_on_device = to_device([rows, have, want], self.table.device)
        last = self.table[row, start_on_device - 1].long()
        slots = self._allocator.alloc_extend(
            start_on_device, start, end_on_device, end, last, count
        )
        return slots
