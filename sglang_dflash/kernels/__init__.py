"""Triton kernels, chosen once by `Kernels.on`.

A kernel whose result a CPU needs, too, is beside its torch twin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from sglang_dflash.kernels import (
    accept,
    argmax,
    biased_argmax,
    next_block,
    store_kv,
)
from sglang_dflash.method.acceptance import Accepted


class Kernels(NamedTuple):
    """The kernels of a device. Their launch functions document the signatures."""

    next_block: Callable[..., next_block.NextBlock]
    largest: Callable[..., argmax.Largest]
    biased_largest: Callable[..., argmax.Largest]
    bias_layout: Callable[[Tensor], Tensor]  # of the weight that `biased_largest` reads
    accept: Callable[..., Accepted]
    store_kv: Callable[..., None]
    written: Callable[..., tuple[Tensor, ...]]  # selects the tokens to project

    @classmethod
    def on(cls, device: str) -> Kernels:
        """device: its type, "cuda" for Triton. Any other device runs the torch twins."""
        if device == "cuda":
            return cls(
                next_block=next_block.launch_next_block,
                largest=argmax.launch_largest,
                biased_largest=biased_argmax.launch_biased_largest,
                bias_layout=biased_argmax.rows_first,
                accept=accept.launch_accept,
                store_kv=store_kv.launch_store_kv,
                written=store_kv.all_tokens,
            )
        return cls(
            next_block=next_block.next_block_in_torch,
            largest=argmax.largest_in_torch,
            biased_largest=biased_argmax.biased_largest_in_torch,
            bias_layout=biased_argmax.columns_first,
            accept=accept.accept_in_torch,
            store_kv=store_kv.store_kv_in_torch,
            written=store_kv.written_tokens,
        )
