"""How often each token occurs in the output of each request, counted on the device."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from weakref import WeakKeyDictionary

import torch
from sglang.srt.managers.schedule_batch import Req
from torch import Tensor

from sglang_dflash.step.copies import to_device
from sglang_dflash.step.sample import SamplingInput


@dataclass
class Counted:
    row: int  # of the table
    length: int = 0  # tokens of output that are counted


class OutputCounts:
    """A row of counts for each request. Each step sends only the tokens of the step before.

    A row belongs to its request, and not to a place in a batch: those move, while a step is in
    flight, with nothing on the device to follow them.
    """

    def __init__(self) -> None:
        self._counted: WeakKeyDictionary[Req, Counted] = WeakKeyDictionary()
        self._table: Tensor | None = None  # [rows, V] int32

    def of(self, asked: SamplingInput, vocab_size: int) -> Tensor:
        """Count the output of these requests before their anchors: [B, V] int32."""
        counted = self._of(asked.reqs)
        table = self._room(max(each.row for each in counted) + 1, vocab_size, asked.info.device)
        # A request that was retracted is prefilled again, with a part of its output or all of it.
        anew = [each for each in counted if each.length == 0 or asked.block is None]
        if anew:
            table.index_fill_(0, to_device([each.row for each in anew], table.device), 0)
            for each in anew:
                each.length = 0
        places: list[int] = []
        for req, each in zip(asked.reqs, counted, strict=True):
            tokens = asked.output_of(req, each.length)
            places.extend(each.row * vocab_size + token for token in tokens)
            each.length += len(tokens)
        if places:
            where = to_device(places, table.device)
            table.view(-1).index_add_(0, where, torch.ones_like(where, dtype=table.dtype))
        return table[to_device([each.row for each in counted], table.device)]

    def length(self, req: Req) -> int:
        """The tokens of a request's output before its anchor, once they are counted."""
        return self._counted[req].length

    def _of(self, reqs: list[Req]) -> list[Counted]:
        """The rows of a batch. A request of it may have finished since it was put together."""
        new = [req for req in reqs if req not in self._counted]
        if new:
            others = set(self._counted) - set(reqs)
            for other in others:
                if other.finished():
                    del self._counted[other]
            taken = {each.row for each in self._counted.values()}
            free = (row for row in count() if row not in taken)
            self._counted.update((req, Counted(row)) for req, row in zip(new, free, strict=False))
        return [self._counted[req] for req in reqs]

    def _room(self, rows: int, vocab_size: int, device: str) -> Tensor:
        """The table, with at least so many rows."""
        if self._table is None:
            self._table = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        have = len(self._table)
        if have < rows:
            more = self._table.new_zeros(max(rows, 2 * have) - have, vocab_size)
            self._table = torch.cat([self._table, more])
        return self._table
