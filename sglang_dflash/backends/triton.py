"""Triton's attention over blocks whose requests have different numbers of rows."""

from __future__ import annotations

from typing import Any

import torch


def fill_starts(_: Any, backend: Any, bs: int, *args: Any, **given: Any) -> None:
    """AFTER `TritonAttnBackend._update_target_verify_buffers`: where each request's rows begin.

    SGLang has filled in equal widths.
    """
    lens = getattr(backend, "dflash_lens", None)
    if lens is not None:
        torch.cumsum(lens[:bs], dim=0, out=backend.qo_indptr[1 : bs + 1])
