"""Capabilities and defaults of each kind of device. The server's --device chooses once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from sglang_dflash.seam import release


@dataclass(frozen=True)
class Platform:
    """Capabilities and defaults of a device."""

    place: str  # in a sentence
    attention_backends: tuple[str, ...]  # for draft and verify; refusals suggest the first
    verify_width: str  # default of --speculative-dflash-verify-width
    draft_ahead: str  # default of --speculative-dflash-draft-ahead
    queues_work: bool  # a call returns before the device has done it
    ragged_widths: bool  # attention serves any rows of each request, without graphs of their own
    quantised_weights: bool
    gdn_dtypes: tuple[torch.dtype, ...]  # of hybrid targets
    tracked_states: bool  # --mamba-scheduler-strategy extra_buffer
    scale_files: bool  # attention applies scales of --quantization-param-path
    sliding_drafts: tuple[str, ...]  # backends that compute sliding windows without causality
    lora_backends: tuple[str, ...]
    adapted_heads: bool  # LoRA adapters on the LM head
    host_cache: bool  # --enable-hierarchical-cache
    bounded_tables: bool  # page tables of attention end at the context length
    pair_flags: tuple[str, ...]  # of a server of the bundled pair, beside those of every machine
    pair_threads: int | None  # of such a server; None: as many as torch takes


PLATFORMS = {
    # Triton is first: it serves every target on every GPU. For the others, SGLang's code was read.
    "cuda": Platform(
        place="on CUDA",
        attention_backends=("triton", "fa3", "flashinfer"),
        verify_width="full",
        draft_ahead="on",
        queues_work=True,
        ragged_widths=False,
        quantised_weights=True,
        gdn_dtypes=(torch.bfloat16, torch.float16),  # SGLang's prefill takes no float32
        tracked_states=True,
        scale_files=False,
        sliding_drafts=("triton", "fa3"),
        lora_backends=("csgmv", "triton"),
        adapted_heads=True,
        host_cache=True,
        bounded_tables=True,
        pair_flags=(),
        pair_threads=None,
    ),
    "cpu": Platform(
        place="on a CPU",
        attention_backends=("torch_native",),
        verify_width="auto",
        draft_ahead="off",  # a CPU has nothing to overlap
        queues_work=False,
        ragged_widths=True,
        quantised_weights=False,
        gdn_dtypes=(torch.float32, torch.bfloat16, torch.float16),
        tracked_states=False,
        scale_files=True,
        sliding_drafts=("torch_native",),
        lora_backends=("torch_native",),
        adapted_heads=False,
        host_cache=False,
        bounded_tables=False,
        pair_flags=("--dtype", "float32"),  # is faster there, and exact
        pair_threads=1,  # such small forwards are fastest on one
    ),
}


def platform_of(server_args: Any) -> Platform:
    """The platform of these server arguments, whose device is one of them."""
    platform = PLATFORMS[server_args.device]
    if release.has_own_scheduler_step():
        return platform
    # SGLang's own worker runs the step: it verifies whole blocks, and always drafts ahead.
    return replace(platform, verify_width="full", draft_ahead="on", ragged_widths=False)


def verify_backend(server_args: Any) -> str:
    """The target's attention backend that verifies blocks."""
    prefill, decode = server_args.get_attention_backends()
    return str(prefill if server_args.speculative_attention_mode == "prefill" else decode)
