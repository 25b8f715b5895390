"""Copies between host and device that no one waits for until they are needed."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.utils import is_pin_memory_available
from torch import Tensor


def to_device(values: Any, device: Any, dtype: torch.dtype = torch.int64) -> Tensor:
    """Queue the copy of numbers, a list or lists of lists of one length; for a GPU it is pinned."""
    on_host = torch.tensor(values, dtype=dtype, pin_memory=is_pin_memory_available(device))
    return on_host.to(device, non_blocking=True)


class HostCopy:
    """A copy of a tensor on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        """Queue the copy; from a GPU it goes to pinned memory."""
        self._copy = tensor.to("cpu", non_blocking=True)
        self._done: torch.Event | None = torch.get_device_module(tensor.device).Event()
        self._done.record()

    def wait(self) -> Tensor:
        """The copy, once it has arrived."""
        if self._done is not None:
            self._done.synchronize()
            self._done = None
        return self._copy

    def arrived(self) -> Tensor:
        """The copy, after the host has waited for a later one."""
        assert self._done is None or self._done.query()
        return self._copy
