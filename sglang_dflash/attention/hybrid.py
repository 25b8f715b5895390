"""Targets with two kinds of attention: attention and gated delta networks (GDN)."""

from __future__ import annotations

from typing import Any

import torch

from sglang_dflash.attention.fa3 import serves_dflash


def begin_in_full_attention(_: None, backend: Any, forward_batch: Any) -> None:
    """AFTER `HybridLinearAttnBackend.init_forward_metadata_in_graph`: call it on the attention."""
    if serves_dflash():
        backend.full_attn_backend.init_forward_metadata_in_graph(forward_batch)


def count_padding(
    original: Any,
    backend: Any,
    bs: int,
    rows: Any,
    forward_mode: Any,
    block: Any,
    seq_lens_cpu: Any,
) -> Any:
    """AROUND `MambaAttnBackendBase._replay_metadata`: the rows behind the block are padding.

    SGLang counts the lengths of 1, the filler, and cuts so many rows from the end of the batch. A
    request whose prompt has one token also has length 1. Then the last request would lose its
    state.
    """
    if seq_lens_cpu is not None and forward_mode.is_target_verify() and serves_dflash():
        filler = backend.get_cuda_graph_seq_len_fill_value()
        seq_lens_cpu = torch.full((bs,), filler)
        seq_lens_cpu[: len(block.slots)] = filler + 1
    return original(backend, bs, rows, forward_mode, block, seq_lens_cpu)
