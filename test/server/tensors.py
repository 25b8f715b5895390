"""Tensors in a request, as another process on the machine sends them."""

from __future__ import annotations

from typing import Any

from sglang.srt.utils import MultiprocessingSerializer
from torch.multiprocessing import get_sharing_strategy, set_sharing_strategy


def serialised(content: Any, shared_by: str = "file_system") -> str:
    """Tensors as SGLang takes them. With "file_descriptor", only a child of this process can."""
    usual = get_sharing_strategy()
    set_sharing_strategy(shared_by)
    try:
        text: str = MultiprocessingSerializer.serialize(content, output_str=True)
    finally:
        set_sharing_strategy(usual)
    return text
