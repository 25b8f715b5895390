"""The recurrent states of a hybrid target: what rejected tokens did to them is undone.

A layer of linear attention keeps one state per request where attention keeps K/V per token. A
verify stores the state behind each position of a block. Afterwards one of them is kept: the state
behind the last committed token. So the slot of a request, like its KV, holds `kv_committed_len`
tokens when the radix cache takes it over.
"""

from __future__ import annotations

from typing import Protocol

import torch
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, ReqToTokenPool
from sglang.srt.utils import is_pin_memory_available
from torch import Tensor

from sglang_dflash.kernels import Kernels


class TargetStates(Protocol):
    """A policy: what the target keeps of a request besides KV."""

    def keep(self, rows: Tensor, num_accepted: Tensor) -> None:
        """Keep the states behind the last accepted tokens, before the next forward.

        rows: [B] int64, the request rows of the last verify, in its order; num_accepted: [B] int64.
        """

    def keep_taken(self, rows: Tensor, num_accepted: Tensor, taken: list[list[int]]) -> None:
        """Keep earlier states for requests that ended inside their accepted tokens.

        num_accepted: [B] int64 on the host; taken: the tokens of each request.
        """


class NoStates:
    """For targets that have only KV."""

    def keep(self, rows: Tensor, num_accepted: Tensor) -> None:
        pass

    def keep_taken(self, rows: Tensor, num_accepted: Tensor, taken: list[list[int]]) -> None:
        pass


class RecurrentStates:
    def __init__(self, pool: HybridReqToTokenPool, kernels: Kernels) -> None:
        cache = pool.get_speculative_mamba2_params_all_layers()
        self._slots, self._kernels = pool.req_index_to_mamba_index_mapping, kernels
        self._pairs = [
            (cache.temporal, cache.intermediate_ssm),
            *zip(cache.conv, cache.intermediate_conv_window, strict=True),
        ]

    def keep(self, rows: Tensor, num_accepted: Tensor) -> None:
        for states, snapshots in self._pairs:
            self._kernels.keep_states(states, snapshots, self._slots, rows, num_accepted)

    def keep_taken(self, rows: Tensor, num_accepted: Tensor, taken: list[list[int]]) -> None:
        pinned = is_pin_memory_available(rows.device)
        last = torch.tensor([len(tokens) - 1 for tokens in taken], pin_memory=pinned)
        if not torch.equal(last, num_accepted):
            self.keep(rows, last.to(rows.device, non_blocking=True))


def states_of(pool: ReqToTokenPool, kernels: Kernels) -> TargetStates:
    """The states of the requests that have a row in this pool."""
    return RecurrentStates(pool, kernels) if isinstance(pool, HybridReqToTokenPool) else NoStates()
