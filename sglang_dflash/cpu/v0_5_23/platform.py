"""A CPU as a platform of SGLang 0.5.23, on which torch computes everything.

SGLang has a CPU platform of its own, whose compiled operations need libraries of CUDA.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import PlatformCapabilities, PlatformEnum, SRTPlatform
from torch import Tensor

BACKEND = "torch_native"


class TorchPlatform(CpuDeviceMixin, SRTPlatform):
    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()  # neither Triton nor graphs

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False

    def get_device(self, device_id: int = 0) -> str:
        return "cpu"

    def get_default_attention_backend(self) -> str:
        return BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return BACKEND

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm == "DFLASH"

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == BACKEND

    def get_speculative_cache_locs_fn(self) -> Callable[..., Tensor]:
        return slots_of_blocks


def slots_of_blocks(
    *,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    draft_token_num: int,
    **_: object,
) -> Tensor:
    """The KV slots of blocks that begin at these positions: [B * N] int64.

    req_pool_indices, start_offset: [B]; req_to_token: [rows, positions]; draft_token_num: N.
    """
    columns = start_offset[:, None] + torch.arange(draft_token_num)
    return req_to_token[req_pool_indices[:, None], columns].flatten().long()
