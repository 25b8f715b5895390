"""Triton kernels, chosen once by `Kernels.on`.

A kernel whose result a CPU needs, too, is beside its reference implementation in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sglang_dflash.kernels import accept, argmax, biased_argmax, next_block, store_kv
from sglang_dflash.method.acceptance import AcceptResult


class Kernels(NamedTuple):
    """The kernels of a device. Their launch functions document the signatures."""

    next_block: Callable[..., next_block.NextBlock]
    largest: Callable[..., argmax.Largest]
    biased_largest: Callable[..., argmax.Largest]
    accept: Callable[..., AcceptResult]
    store_kv: Callable[..., None]

    @classmethod
    def on(cls, device: str) -> Kernels:
        """device: its type, "cuda" for Triton. Any other device runs the references."""
        if device == "cuda":
            return cls(
                next_block=next_block.launch_next_block,
                largest=argmax.launch_largest,
                biased_largest=biased_argmax.launch_biased_largest,
                accept=accept.launch_accept,
                store_kv=store_kv.launch_store_kv,
            )
        return cls(
            next_block=next_block.next_block_in_torch,
            largest=argmax.largest_in_torch,
            biased_largest=biased_argmax.biased_largest_in_torch,
            accept=accept.accept_in_torch,
            store_kv=store_kv.store_kv_in_torch,
        )
