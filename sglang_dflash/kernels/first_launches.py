"""The first launches of the kernels of sampled requests, at startup.

Triton compiles a kernel at its first launch, for seconds. Neither a greedy request nor a captured
graph launches these, so all requests would wait for the first sampled one.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import torch

from sglang_dflash.kernels import Kernels
from sglang_dflash.kernels.draw import Sampling
from sglang_dflash.method.noise import NoiseTable


def launch_draws(
    kernels: Kernels,
    table: NoiseTable,
    vocab_size: int,
    block_size: int,
    dtypes: Iterable[torch.dtype],
    ragged: bool,
) -> None:
    """Draw a token of a request that does not exist, and judge its drafts, of which none is drawn.

    dtypes: of logits; ragged: whether requests may have different numbers of positions.
    """
    row = table.seeds.new_zeros(1)  # no request's: the pad of batches
    one = table.temperatures.new_ones(1)
    for dtype, filters, by_request in product(dtypes, (False, True), {False, ragged}):
        logits = torch.zeros(1, vocab_size, dtype=dtype, device=row.device)
        top_k = torch.full_like(row, 2 if filters else vocab_size, dtype=torch.int32)
        sampling = Sampling(one, top_k, one, one - 1, row, table.seeds, filters)
        kernels.draw(logits, sampling, row, row if by_request else None)
    block = row.new_zeros(1, block_size)
    picks = block.expand(table.scores.shape[1], 1, block_size).contiguous()
    kernels.judge_shares(picks, block, row, row, table)
