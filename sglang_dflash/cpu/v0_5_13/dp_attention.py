"""DP attention on a CPU: SGLang's gathers and scatters, and how it divides heads."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.dp_attention import get_attention_tp_size
from torch import Tensor


def copy_rows(
    to: Tensor, of: Tensor, dim: int, offset: Tensor, count: Tensor, offset_src: bool
) -> None:
    """REPLACE `dp_attention.memcpy_triton`: so many rows, which begin at an offset on one side."""
    start, rows = int(offset), int(count)
    if offset_src:
        to[:rows] = of[start : start + rows]
    else:
        to[start : start + rows] = of[:rows]


def gather_into(group: Any, output: Tensor, input: Tensor) -> None:
    """REPLACE `GroupCoordinator.all_gather_into_tensor`, whose operator CPUs lack."""
    group._all_gather_into_tensor(output.view(-1), input.reshape(-1))  # Gloo compares shapes


def scatter_sum(group: Any, output: Tensor, input: Tensor) -> None:
    """REPLACE `GroupCoordinator.reduce_scatter_tensor`, whose operator CPUs lack."""
    summed = group.all_reduce(input.clone())
    output.copy_(summed.tensor_split(group.world_size)[group.rank_in_group])


def divided_heads(original: Any, config: Any, load_config: Any, _tp_size: int) -> Any:
    """AROUND `adjust_config_with_unaligned_cpu_tp`, which pads heads until they can be divided.

    With DP attention, heads are divided among fewer ranks than MLPs.
    """
    return original(config, load_config, get_attention_tp_size())
