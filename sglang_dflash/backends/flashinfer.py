"""FlashInfer plans a forward on the host. Plans of blocks use lengths that the host knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.seam.patched import temporarily
from sglang_dflash.step.forward import VerifyInput


def plan_on_host(_: None, updater: Any, *made_of: Any) -> None:
    """AFTER `FlashInferIndicesUpdaterPrefill.__init__`: blocks are planned by `Plans`."""
    updater.update = Plans(updater)


class Plans:
    """Replaces `FlashInferIndicesUpdaterPrefill.update`: plans of blocks wait for nothing.

    `plan` reads lengths on the host. It fetches those that are on the device, three tensors per
    forward. For a block, the host's lengths are the true ones, and each last page holds one token.
    """

    def __init__(self, updater: Any) -> None:
        self._updater = updater
        self._update: Callable[..., None] = updater.update
        self._last_page_len = updater.kv_last_page_len.cpu().pin_memory()
        self._copied = torch.cuda.Event()

    def __call__(
        self, rows: Tensor, seq_lens: Tensor, seq_lens_cpu: Tensor, *args: Any, **given: Any
    ) -> None:
        if not isinstance(given["spec_info"], VerifyInput):
            return self._update(rows, seq_lens, seq_lens_cpu, *args, **given)
        if not self._copied.query():  # a plan overwrites the pinned memory of the one before
            self._copied.synchronize()
        with temporarily(self._updater, kv_last_page_len=self._last_page_len):
            self._update(rows, seq_lens_cpu, seq_lens_cpu, *args, **given)
        self._copied.record()
        return None
