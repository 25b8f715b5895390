"""A block as SGLang reads it: its forward, and the input of its attention backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.utils import create_flashinfer_kv_indices_triton
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType, SpeculativeAlgorithm
from torch import Tensor

from sglang_dflash.method.block import Block


@dataclass
class VerifyInput(SpecInput):
    """`spec_info` of a forward in TARGET_VERIFY mode, of the draft or of the target."""

    block: Block
    capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.FULL
    topk: int = 1
    custom_mask: Tensor | None = None  # a chain: the backends' own causal path is exact

    def __post_init__(self) -> None:
        super().__init__(SpecInputType.DFLASH_VERIFY)
        assert self.block.parents is None, "SGLang's backends verify chains"
        self.draft_token_num = self.num_tokens_per_batch = self.block.width
        self.num_tokens_per_req = self.block.width
        self.draft_token = self.block.flatten(self.block.token_ids)  # [T]
        self.positions = self.block.flatten(self.block.positions)  # [T]
        self.out_cache_loc = self.block.flatten(self.block.slots)  # [T]

    @property
    def lens(self) -> list[int]:
        """Tokens of each request, for attention on a CPU."""
        lens = self.block.lens
        return [self.block.width] * len(self.block.slots) if lens is None else lens.tolist()

    def forward_batch(
        self, req_pool_indices: Tensor, seq_lens: Tensor, seq_lens_cpu: Tensor
    ) -> ForwardBatch:
        """The forward of the block after contexts of these lengths, [B] int64 each.

        seq_lens_cpu may exceed the true lengths, because backends size buffers by it. FlashInfer
        plans by it and needs the true ones.
        """
        return ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=len(req_pool_indices),
            input_ids=self.draft_token,
            req_pool_indices=req_pool_indices,
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens_cpu,
            seq_lens_sum=sum(seq_lens_cpu.tolist()),
            out_cache_loc=self.out_cache_loc,
            positions=self.positions,
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=self,
            capture_hidden_mode=self.capture_hidden_mode,
        )

    def get_spec_adjust_token_coefficient(self) -> tuple[int, int]:
        return self.draft_token_num, self.draft_token_num

    def generate_attn_arg_prefill(
        self,
        req_pool_indices: Tensor,
        paged_kernel_lens: Tensor,
        paged_kernel_lens_sum: int,
        req_to_token: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        """FlashInfer's view of context and block: KV indices, KV indptr, query indptr, no mask.

        paged_kernel_lens: [B] int64. Both indptr tensors are created on its device.
        """
        requests = len(req_pool_indices)
        width = self.draft_token_num
        device = req_to_token.device
        plan_device = paged_kernel_lens.device
        pinned = plan_device != device
        options: Any = {"dtype": torch.int32, "device": plan_device, "pin_memory": pinned}
        kv_indptr = torch.zeros(requests + 1, **options)
        kv_indptr[1:] = (paged_kernel_lens + width).cumsum(0)
        qo_indptr = torch.arange(0, (requests + 1) * width, width, **options)
        starts = kv_indptr.to(device, non_blocking=True)
        kv_indices = starts.new_empty(paged_kernel_lens_sum + width * requests)
        create_flashinfer_kv_indices_triton[(requests,)](
            req_to_token,
            req_pool_indices,
            starts.diff(),
            starts,
            None,
            kv_indices,
            req_to_token.stride(0),
        )
        return kv_indices, kv_indptr, qo_indptr, None
