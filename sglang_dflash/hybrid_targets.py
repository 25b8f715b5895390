"""Hooks for hybrid targets: the memory of their recurrent states, and the radix cache of these."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.server_args import ServerArgs, get_global_server_args

logger = logging.getLogger(__name__)


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
