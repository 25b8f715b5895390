"""The recurrent states of a hybrid target follow the committed tokens.

A layer of linear attention keeps one state per request where attention keeps K/V per token. A
verify does not advance it. Once the host knows which tokens are committed, they are replayed. So
the slot of a request, like its KV, holds `kv_committed_len` tokens when the radix cache takes it
over.

With `--mamba-scheduler-strategy extra_buffer`, the radix cache takes over another slot of the
request instead. That one holds the state after the last multiple of an interval.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from torch import Tensor

from sglang_dflash.step.copies import to_device
from sglang_dflash.step.policies import NoStates, TargetStates
from sglang_dflash.targets.replay_states import Copies, Layer, Weights, replay_on


class RecurrentStates:
    def __init__(self, runner: Any, replay: Callable[..., None]) -> None:
        """runner: the target's ModelRunner; replay: `launch_replay_states`, or its reference."""
        rows = runner.req_to_token_pool
        self._slots = rows.req_index_to_mamba_index_mapping
        self._replay = replay
        self._states, self._inputs = rows.mamba_pool.dflash_states, rows.mamba_pool.dflash_inputs
        # [rows, 1], the slot of each request for the radix cache
        self._kept = getattr(rows, "req_index_to_mamba_ping_pong_track_buffer_mapping", None)
        self._interval = runner.server_args.mamba_track_interval
        attention = {
            module.layer_id: module
            for module in runner.model.modules()
            if isinstance(module, RadixLinearAttention)
        }
        # The pool's layers are in the order of their ids.
        self._weights = Weights([_weights_of(attention[layer]) for layer in rows.mamba_map])

    def commit(self, rows: Tensor, num_committed: list[int], lens: list[int]) -> None:
        self._replay(
            self._states,
            self._inputs,
            self._weights,
            self._slots[rows],
            to_device(num_committed, rows.device),
            self._copies(rows, num_committed, lens),
        )

    def _copies(self, rows: Tensor, num_committed: list[int], lens: list[int]) -> Copies | None:
        """The states that the radix cache may take over later."""
        if self._kept is None:
            return None
        after = tokens_to_interval(num_committed, lens, self._interval)
        return Copies(self._kept[rows, 0], to_device(after, rows.device)) if any(after) else None


def tokens_to_interval(num_committed: list[int], lens: list[int], interval: int) -> list[int]:
    """Each request's new tokens up to the last multiple of `interval` that it crossed, else 0.

    SGLang reads the same rule from `num_correct_drafts_per_req_cpu`
    (`BatchResultProcessor._mamba_check_track_boundary`).
    """
    return [max(0, n - length % interval) for n, length in zip(num_committed, lens, strict=True)]


def _weights_of(layer: RadixLinearAttention) -> Layer:
    assert layer.bias is None
    assert layer.activation in ("silu", "swish")
    return Layer(layer.conv_weights, layer.A_log, layer.dt_bias, layer.num_k_heads)


def states_of(runner: Any) -> TargetStates:
    """The states that this target's requests have. runner: its ModelRunner."""
    hybrid = isinstance(runner.req_to_token_pool, HybridReqToTokenPool)
    return RecurrentStates(runner, replay_on(runner.device)) if hybrid else NoStates()
