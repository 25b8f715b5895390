"""Triton kernels, chosen once by `Kernels.on`.

A kernel whose result a CPU needs, too, is beside its reference implementation in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from sglang_dflash.kernels import (
    accept,
    argmax,
    biased_argmax,
    draw,
    next_block,
    noise,
    rows,
    shares,
    store_kv,
)
from sglang_dflash.method import survival
from sglang_dflash.method.acceptance import AcceptResult


class Kernels(NamedTuple):
    """The kernels of a device. Their launch functions document the signatures."""

    next_block: Callable[..., next_block.NextBlock]
    largest: Callable[..., argmax.Largest]
    biased_largest: Callable[..., argmax.Largest]
    draw: Callable[..., Tensor]
    gumbel: Callable[..., Tensor]
    accept: Callable[..., AcceptResult]
    judge_shares: Callable[..., None]
    survival: Callable[..., Tensor]
    learn_survival: Callable[..., None]
    choose_rows: Callable[..., rows.Rows]
    store_kv: Callable[..., None]

    @classmethod
    def on(cls, device: str) -> Kernels:
        """device: its type, "cuda" for Triton. Any other device runs the references."""
        if device == "cuda":
            return cls(
                next_block=next_block.launch_next_block,
                largest=argmax.launch_largest,
                biased_largest=biased_argmax.launch_biased_largest,
                draw=draw.launch_draw,
                gumbel=noise.launch_gumbel,
                accept=accept.launch_accept,
                judge_shares=shares.launch_judge_shares,
                survival=rows.launch_survival,
                learn_survival=rows.launch_learn_survival,
                choose_rows=rows.launch_choose_rows,
                store_kv=store_kv.launch_store_kv,
            )
        return cls(
            next_block=next_block.next_block_in_torch,
            largest=argmax.largest_in_torch,
            biased_largest=biased_argmax.biased_largest_in_torch,
            draw=draw.draw_in_torch,
            gumbel=noise.gumbel_in_torch,
            accept=accept.accept_in_torch,
            judge_shares=shares.judge_shares_in_torch,
            survival=survival.survival,
            learn_survival=survival.learn,
            choose_rows=rows.choose_rows_in_torch,
            store_kv=store_kv.store_kv_in_torch,
        )
