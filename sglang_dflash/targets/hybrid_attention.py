"""Targets with two kinds of attention: attention and gated delta networks (GDN)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def begin_in_full_attention(_: None, backend: Any, forward_batch: Any) -> None:
    """AFTER `HybridLinearAttnBackend.init_forward_metadata_in_graph`: call it on the attention."""
    backend.full_attn_backend.init_forward_metadata_in_graph(forward_batch)


def count_padding(
    original: Any,
    backend: Any,
    bs: int,
    rows: Any,
    forward_mode: Any,
    verify_input: Any,
    seq_lens_cpu: Any,
) -> Any:
    """AROUND `MambaAttnBackendBase._replay_metadata`: the rows after the block are padding.

    SGLang counts the lengths of 1, the filler, and cuts so many rows from the end of the batch. A
    request whose prompt has one token also has length 1. Then the last request would lose its
    state.
    """
    if seq_lens_cpu is not None and forward_mode.is_target_verify():
        filler = backend.get_cuda_graph_seq_len_fill_value()
        seq_lens_cpu = torch.full((bs,), filler)
        seq_lens_cpu[: len(verify_input.block.slots)] = filler + 1
    return original(backend, bs, rows, forward_mode, verify_input, seq_lens_cpu)


def verify_block(
    original: Any,
    backend: Any,
    layer: Any,
    forward_batch: Any,
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    **kwargs: Any,
) -> Any:
    """AROUND `GDNAttnBackend.forward_extend`: a verify remembers its inputs, not its states.

    mixed_qkv: [B * w, C]; a, b: [B * w, HV]. Returns [1, B * w, HV, V]. SGLang's kernels store a
    state per position only if they are given room for it. Its convolution leaves the block's end in
    the window, which `replay_states` stores anew.
    """
    if not forward_batch.forward_mode.is_target_verify():
        return original(backend, layer, forward_batch, mixed_qkv, a, b, **kwargs)
    from sglang.srt.layers.attention.mamba.causal_conv1d_triton import causal_conv1d_update

    rows, plan = backend.req_to_token_pool, backend.forward_metadata
    states, width = rows.mamba2_layer_cache(layer.layer_id), forward_batch.spec_info.draft_token_num
    slots = plan.mamba_cache_indices
    blocks, *gates = (x.unflatten(0, (-1, width)) for x in (mixed_qkv, a, b))
    # A padded row has slot -1. It reads the last slot, and nobody reads what it remembers.
    rows.mamba_pool.dflash_inputs.store(
        rows.mamba_map[layer.layer_id], states.conv[0][slots], blocks, *gates
    )
    convolved = causal_conv1d_update(
        blocks.transpose(1, 2),
        states.conv[0],
        layer.conv_weights,
        layer.bias,
        layer.activation,
        conv_state_indices=slots,
    )
    qkv = convolved.transpose(1, 2).flatten(0, 1).unsqueeze(0)  # [1, B * w, C]
    query, key, value = qkv.split([layer.q_dim, layer.k_dim, layer.v_dim], dim=2)
    return backend.kernel_dispatcher.target_verify(
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        q=query.unflatten(2, (-1, layer.head_q_dim)),
        k=key.unflatten(2, (-1, layer.head_k_dim)),
        v=value.unflatten(2, (-1, layer.head_v_dim)),
        a=a,
        b=b,
        ssm_states=states.temporal,
        cache_indices=slots,
        query_start_loc=plan.query_start_loc,
        intermediate_states_buffer=None,
        intermediate_state_indices=None,
        cache_steps=width,
        retrieve_parent_token=None,
    )
