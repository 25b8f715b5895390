"""Hybrid targets: which are served, the memory of their states, and the radix cache of these."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.configs import Qwen3_5Config, Qwen3NextConfig
from sglang.srt.configs.linear_attn_model_registry import get_linear_attn_config
from sglang.srt.configs.mamba_utils import mamba2_state_dtype
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import ServerArgs, get_global_server_args

from sglang_dflash.errors import WITHOUT_DFLASH, Refusal
from sglang_dflash.platforms import platform_of

logger = logging.getLogger(__name__)

GDN_CONFIGS = (Qwen3NextConfig, Qwen3_5Config)  # and the classes derived from them


def check_states(server_args: ServerArgs) -> None:
    """BEFORE `ServerArgs._handle_model_specific_adjustments`: refuse other recurrent states.

    SGLang's own check there suggests flags for another scheduler. Gated delta networks (GDN) are
    the only linear attention for which SGLang stores the state behind each position of a verify.
    """
    if (server_args.speculative_algorithm or "").upper() != "DFLASH":
        return
    model_config = server_args.get_model_config()
    if keeps_gdn_states(model_config):
        return
    if _keeps_state(model_config.hf_config) or _keeps_state(model_config.hf_text_config):
        raise Refusal(
            f"The target {server_args.model_path} has a recurrent state (Mamba, short convolutions "
            "or similar) that SGLang cannot restore after a partial acceptance.",
            WITHOUT_DFLASH,
        )


def keeps_gdn_states(model_config: ModelConfig) -> bool:
    """Whether the target is a hybrid of attention and gated delta networks."""
    return isinstance(model_config.hf_config.get_text_config(), GDN_CONFIGS)


def _keeps_state(config: Any) -> bool:
    """Whether SGLang's config class counts layers that keep a recurrent state."""
    kind = type(config)
    if hasattr(kind, "mamba_layer_ids"):  # Granite's and Nemotron's may count none
        return bool(config.mamba_layer_ids)
    return hasattr(kind, "linear_layer_ids") or get_linear_attn_config(config) is not None


def check_state_dtypes(server_args: ServerArgs, model_config: ModelConfig) -> None:
    """Refuse dtypes with which a verify would round states otherwise than decoding does."""
    if not keeps_gdn_states(model_config):
        return
    target, dtype = f"The target {server_args.model_path}", model_config.dtype
    able = platform_of(server_args).gdn_dtypes
    if dtype not in able:
        raise Refusal(
            f"{target} is to compute in {dtype}, which SGLang's linear attention does not do on a "
            f"{server_args.device.upper()}.",
            f"Give --dtype {_name(able[0])}.",
        )
    kept = mamba2_state_dtype(model_config.hf_config)
    if kept.conv != dtype:
        raise Refusal(
            f"{target} computes in {dtype}, but SGLang keeps its convolution states in "
            f"{kept.conv}, and a verify does not round them as decoding does.",
            f"Set SGLANG_MAMBA_CONV_DTYPE={_name(dtype)}.",
        )
    if (server_args.mamba_ssm_dtype or _name(kept.temporal)) != "float32":
        raise Refusal(
            f"{target} keeps its recurrent states in "
            f"{server_args.mamba_ssm_dtype or kept.temporal}. One-token decoding rounds them after "
            "each token, and a verify after each block.",
            "Give --mamba-ssm-dtype float32.",
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def share_states(original: Callable[..., None], server_args: ServerArgs, **given: Any) -> None:
    """AROUND `ServerArgs._handle_mamba_radix_cache`: the radix cache of a hybrid target stays on.

    SGLang refuses it for speculation, because its own workers leave the state of all accepted
    tokens when a request ends inside them. Here the slot has the state of the committed tokens.
    """
    algorithm = server_args.speculative_algorithm
    hidden = (algorithm or "").upper() == "DFLASH" and not server_args.enable_mamba_extra_buffer()
    if hidden:
        server_args.speculative_algorithm = None
    try:
        original(server_args, **given)
    finally:
        server_args.speculative_algorithm = algorithm


def bound_states(runner: Any, total_rest_memory: float) -> None:
    """BEFORE `ModelRunner.handle_max_mamba_cache`: as many requests as there is memory for states.

    total_rest_memory: GiB that the weights leave. SGLang itself fits the number of requests into
    memory only if the radix cache is on. Without it, the states of all requests are allocated.
    """
    if not runner.spec_algorithm.is_dflash():
        return
    args, state = runner.server_args, runner.mambaish_config.mamba2_cache_params.mamba_cache_per_req
    width = args.speculative_num_draft_tokens
    per_request = state * (1 + width)
    logger.info(
        f"DFLASH: a running request takes {per_request / 2**20:.1f} MiB for recurrent states: its "
        f"own of {state / 2**20:.1f} MiB, and one for each of the {width} positions of a block. "
        "With the radix cache, it takes two more of its own."
    )
    if args.max_mamba_cache_size is None and args.disable_radix_cache:
        share = args.mamba_full_memory_ratio / (1 + args.mamba_full_memory_ratio)
        fitting = int(total_rest_memory * 2**30 * share / per_request) - 1  # SGLang adds one
        args.max_mamba_cache_size = min(args.max_running_requests // args.dp_size, fitting)


def forget_old_match(cache: Any, params: Any, value: Any, last_node: Any, *_: Any) -> None:
    """BEFORE `MambaRadixCache._match_post_processor`: a waiting request may match less than before.

    A request copies the state that it matched at its prefill. While it waits, that state can be
    evicted. SGLang still copies what is in its place then.
    """
    dflash = get_global_server_args().speculative_algorithm == "DFLASH"
    if dflash and params.cow_mamba and last_node.mamba_value is None:
        params.req.mamba_cow_src_index, params.req.mamba_needs_clear = None, True
