"""Hybrid targets: which are served, the memory of their states, and the radix cache of these."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.configs import Qwen3_5Config, Qwen3NextConfig
from sglang.srt.configs.linear_attn_model_registry import get_linear_attn_config
from sglang.srt.configs.mamba_utils import BaseLinearStateParams, mamba2_state_dtype
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.server_args import ServerArgs

from sglang_dflash.checkpoint.fit import OTHER_STATES
from sglang_dflash.errors import WITHOUT_DFLASH, Rule, refuse
from sglang_dflash.seam.patched import temporarily
from sglang_dflash.settings.facts import Facts
from sglang_dflash.targets.replay_states import BlockInputs, States

logger = logging.getLogger(__name__)

GDN_CONFIGS = (Qwen3NextConfig, Qwen3_5Config)  # and the classes derived from them


def keeps_gdn_states(target: ModelConfig) -> bool:
    """Whether the target is a hybrid of attention and gated delta networks."""
    return isinstance(target.hf_config.get_text_config(), GDN_CONFIGS)


def keeps_states(target: ModelConfig) -> bool:
    """Whether the target has layers with recurrent states, of any kind."""
    return keeps_gdn_states(target) or _keeps_other_states(target)


def _keeps_other_states(target: ModelConfig) -> bool:
    configs = target.hf_config, target.hf_text_config
    return not keeps_gdn_states(target) and any(map(_keeps_state, configs))


def _keeps_state(config: Any) -> bool:
    """Whether SGLang's config class counts layers that keep a recurrent state."""
    kind = type(config)
    if hasattr(kind, "mamba_layer_ids"):  # Granite's and Nemotron's may count none
        return bool(config.mamba_layer_ids)
    return hasattr(kind, "linear_layer_ids") or get_linear_attn_config(config) is not None


STRATEGY = (
    "DFLASH does not work with --mamba-scheduler-strategy {f.args.mamba_scheduler_strategy}: "
)
WITHOUT_STRATEGY = "Leave it out: the radix cache also works without it."
# States that are stored at intervals, where nothing or something else stores them.
STRATEGY_RULES: tuple[Rule[Facts], ...] = (
    Rule(
        "`--mamba-scheduler-strategy` for targets without recurrent states",
        lambda f: not keeps_gdn_states(f.target),
        STRATEGY + "the target {f.args.model_path} has no recurrent states that DFLASH serves.",
        WITHOUT_STRATEGY,
    ),
    Rule(
        "`--mamba-scheduler-strategy` other than no_buffer, extra_buffer",
        lambda f: f.args.mamba_scheduler_strategy != "extra_buffer",
        STRATEGY + "it needs SGLang's overlap scheduler, which has no spec-v1 workers.",
        WITHOUT_STRATEGY,
    ),
    Rule(
        "`--mamba-scheduler-strategy extra_buffer` on a CPU",
        lambda f: not f.platform.tracked_states,
        STRATEGY + "a prefill stores such states on CUDA only.",
        WITHOUT_STRATEGY,
    ),
    Rule(
        "`--mamba-scheduler-strategy extra_buffer` with `--enable-streaming-session`",
        lambda f: f.args.enable_streaming_session,
        STRATEGY + "streaming sessions hand such states over, which has not been compared.",
        WITHOUT_STRATEGY,
    ),
)
OTHER_STATES_RULE = Rule[Facts](
    "targets with other recurrent states than gated delta networks",
    lambda f: _keeps_other_states(f.target),
    "The target {f.args.model_path} " + OTHER_STATES,
    WITHOUT_DFLASH,
)


def check_states(server_args: ServerArgs) -> None:
    """BEFORE `ServerArgs._handle_model_specific_adjustments`: refuse other recurrent states.

    SGLang's own check there suggests flags for another scheduler. Gated delta networks (GDN) are
    the only linear attention that is replayed after a verify.
    """
    facts = Facts(server_args)
    if server_args.mamba_scheduler_strategy != "no_buffer":
        refuse(STRATEGY_RULES, facts)
    refuse([OTHER_STATES_RULE], facts)


@dataclass(frozen=True)
class StateFacts(Facts):
    """A server of a hybrid target, and the dtypes of its states."""

    @property
    def conv(self) -> str:
        return _name(mamba2_state_dtype(self.target.hf_config).conv)

    @property
    def recurrent(self) -> str:
        kept = mamba2_state_dtype(self.target.hf_config).temporal
        return self.args.mamba_ssm_dtype or _name(kept)

    @property
    def gdn_dtype(self) -> str:
        """A dtype that the target can compute in."""
        return _name(self.platform.gdn_dtypes[0])


# Of hybrid targets, where a verify would round states otherwise than decoding, or not replay them.
RULES: tuple[Rule[StateFacts], ...] = (
    Rule(
        "`--cpu-offload-gb`, `--offload-group-size`, hybrid targets",
        lambda f: f.args.cpu_offload_gb > 0 or f.args.offload_group_size > 0,
        "The target {f.args.model_path} has recurrent states, and DFLASH replays them with weights "
        "that must stay on the device.",
        "Leave --cpu-offload-gb and --offload-group-size out.",
    ),
    Rule(
        "`--dtype float32` on CUDA, hybrid targets",
        lambda f: f.target.dtype not in f.platform.gdn_dtypes,
        "The target {f.args.model_path} is to compute in {f.dtype}, which SGLang's linear "
        "attention does not do {f.platform.place}.",
        "Give --dtype {f.gdn_dtype}.",
    ),
    Rule(
        "`SGLANG_MAMBA_CONV_DTYPE` other than the target's dtype, hybrid targets",
        lambda f: f.conv != f.dtype,
        "The target {f.args.model_path} computes in {f.dtype}, but SGLang keeps its convolution "
        "states in {f.conv}, and a verify does not round them as decoding does.",
        "Set SGLANG_MAMBA_CONV_DTYPE={f.dtype}.",
    ),
    Rule(
        "`--mamba-ssm-dtype` other than float32, hybrid targets",
        lambda f: f.recurrent != "float32",
        "The target {f.args.model_path} keeps its recurrent states in {f.recurrent}. One-token "
        "decoding rounds them after each token, and a verify after each block.",
        "Give --mamba-ssm-dtype float32.",
    ),
)


def check_states_are_replayed(facts: Facts) -> None:
    """Raise `Refusal` for what a hybrid target's states cannot be replayed with."""
    if keeps_gdn_states(facts.target):
        refuse(RULES, StateFacts(facts.args))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def share_states(original: Callable[..., None], server_args: ServerArgs, **given: Any) -> None:
    """AROUND `ServerArgs._handle_mamba_radix_cache`: the radix cache of a hybrid target stays on.

    Without `extra_buffer`, SGLang refuses it for speculation, because its own workers leave the
    state of all accepted tokens when a request ends inside them. Here the slot has the state of the
    committed tokens.
    """
    if server_args.enable_mamba_extra_buffer():
        return original(server_args, **given)
    with temporarily(server_args, speculative_algorithm=None):
        return original(server_args, **given)


def bound_states(original: Callable[..., float], runner: Any, total_rest_memory: float) -> float:
    """AROUND `ModelRunner.handle_max_mamba_cache`: as many requests as there is memory for states.

    total_rest_memory: GiB that the weights leave. SGLang counts a state for each position of a
    block. Here it counts what a block's inputs take, in states. SGLang itself fits the number of
    requests into memory only if the radix cache is on. Without it, the states of all requests are
    allocated.
    """
    args, params = runner.server_args, runner.mambaish_config.mamba2_cache_params
    state, width = params.mamba_cache_per_req, args.speculative_num_draft_tokens
    inputs, others = bytes_of_inputs(params, width), runner._calculate_mamba_ratio() - 1
    logger.info(
        f"DFLASH: recurrent states take {(state + inputs) / 2**20:.1f} MiB per running request: "
        f"{state / 2**20:.1f} MiB, and {inputs / 2**20:.1f} MiB for the inputs of a block of "
        f"{width}. The radix cache keeps {others} more states per request."
    )
    if args.max_mamba_cache_size is None and args.disable_radix_cache:
        share = args.mamba_full_memory_ratio / (1 + args.mamba_full_memory_ratio)
        fitting = int(total_rest_memory * 2**30 * share / (state + inputs)) - 1  # SGLang adds one
        args.max_mamba_cache_size = min(args.max_running_requests, fitting)
    with temporarily(args, speculative_num_draft_tokens=inputs / state):
        return original(runner, total_rest_memory)


def bytes_of_inputs(params: BaseLinearStateParams, positions: int) -> int:
    """The memory of `BlockInputs` for one request, all layers of a rank."""
    [(channels, window)], (heads, *_) = params.shape.conv, params.shape.temporal
    values = channels * (window + positions) + 2 * heads * positions
    return int(values * params.dtype.conv.itemsize * len(params.layers))


def store_inputs(
    original: Callable[..., None],
    pool: Any,
    *,
    speculative_num_draft_tokens: int | None = None,
    **given: Any,
) -> None:
    """AROUND `MambaPool.__init__`: what a block reads is kept, instead of a state per position."""
    positions = speculative_num_draft_tokens
    if positions is None:
        original(pool, speculative_num_draft_tokens=positions, **given)
        return
    original(pool, **given)
    cache = pool.mamba_cache
    pool.dflash_states = states = States(cache.conv[0], cache.temporal)
    with pool.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
        pool.dflash_inputs = BlockInputs.zeros(states, given["spec_state_size"], positions)
    sizes = (part.nbytes for part in pool.dflash_inputs.tensors())
    pool.mem_usage += sum(sizes) / 2**30


def forget_old_match(cache: Any, params: Any, value: Any, last_node: Any, *_: Any) -> None:
    """BEFORE `MambaRadixCache._match_post_processor`: a waiting request may match less than before.

    A request copies the state that it matched at its prefill. While it waits, that state can be
    evicted. SGLang still copies what is in its place then.
    """
    if params.cow_mamba and last_node.mamba_value is None:
        params.req.mamba_cow_src_index, params.req.mamba_needs_clear = None, True
