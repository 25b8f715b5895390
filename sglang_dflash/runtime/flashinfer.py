"""FlashInfer plans a forward on the host: it is told the lengths of a block that the host knows."""

from __future__ import annotations

from functools import partial
from typing import Any

from sglang.srt.server_args import get_global_server_args
from torch import Tensor

from sglang_dflash.runtime.state import DFlashBlock


def plan_by_the_host(_: None, updater: Any, *made_of: Any) -> None:
    """AFTER `FlashInferIndicesUpdaterPrefill.__init__`: `plan` finds all that it reads on the host.

    What lies on the device it would copy, and wait for, three tensors a forward.
    """
    if get_global_server_args().speculative_algorithm == "DFLASH":
        updater.kv_last_page_len = updater.kv_last_page_len.cpu().pin_memory()  # always 1
        updater.update = partial(_update, updater.update)


def _update(
    update: Any, rows: Tensor, seq_lens: Tensor, seq_lens_cpu: Tensor, *args: Any, **given: Any
) -> None:
    """`FlashInferIndicesUpdaterPrefill.update`; the host's lengths of a block are the true ones.

    A plan is copied from pinned memory that the next one overwrites. Between two plans of a backend
    the host has always waited for the device: for a step's result, or with SGLang for the inputs of
    a prefill. So a verify is not planned ahead of its step.
    """
    if isinstance(given["spec_info"], DFlashBlock):
        seq_lens = seq_lens_cpu
    update(rows, seq_lens, seq_lens_cpu, *args, **given)
