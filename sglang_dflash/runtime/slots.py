"""Keeps KV slots for the next block behind every request; one allocation serves both pools."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from torch import Tensor
from torch.nn import functional as F

from sglang_dflash.core.slots import Ints, grow, reserved_end


class Slots:
    def __init__(self, rows: ReqToTokenPool, allocator: BaseTokenToKVPoolAllocator) -> None:
        self._table = rows.req_to_token  # [rows, context_len + reserve] int32
        self._allocator = allocator
        self._page_size = allocator.page_size

    def reserve(self, batch: ScheduleBatch, count: int) -> None:
        """Give every request slots for `count` tokens behind its committed ones.

        The scheduler makes sure of the memory before each decode step, by `tokens_for_next_decode`.
        """
        width, page = self._table.shape[1], self._page_size
        wanted = [
            (row, req, reserved_end(req.kv_committed_len, count, page, width))
            for row, req in enumerate(batch.reqs)
            if req.kv_allocated_len < req.kv_committed_len + count
        ]
        if not wanted:
            return
        growth = grow([req.kv_allocated_len for _, req, _ in wanted], [w for *_, w in wanted], page)
        fresh = self._allocator.alloc(growth.num_pages * page)
        assert fresh is not None, "decode started without the memory that check_decode_mem promised"
        device = self._table.device

        def to_device(host: Ints | NDArray[np.bool_]) -> Tensor:
            return torch.from_numpy(host).to(device, non_blocking=True)

        row = batch.req_pool_indices[to_device(np.array([row for row, *_ in wanted]))]
        request, position = to_device(growth.request), to_device(growth.position)
        slots = F.pad(fresh, (1, 0))[to_device(growth.page_slot + 1)]
        if growth.in_tail.any():
            last = to_device(np.array([req.kv_allocated_len - 1 for _, req, _ in wanted]))
            tail = self._table[row, last].long()[request] + to_device(growth.tail_offset)
            slots = torch.where(to_device(growth.in_tail), tail, slots)
        self._table[row[request], position] = slots.to(self._table.dtype)
        for _, req, want in wanted:
            req.kv_allocated_len = want

    def of(self, batch: ScheduleBatch, positions: Tensor) -> Tensor:
        """Slots of positions. positions: [B, n] int64 -> [B, n] int64."""
        return self._table[batch.req_pool_indices[:, None], positions].long()
