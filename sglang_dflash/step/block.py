"""A block in a forward, as SGLang's attention backends and graph runner read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.layers.attention.utils import create_flashinfer_kv_indices_triton
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType, SpeculativeAlgorithm
from torch import Tensor


@dataclass
class DFlashBlock(SpecInput):
    """N tokens of each request in TARGET_VERIFY mode, for the draft or for the target.

    Requests may hold fewer than N positions (`present`). A forward then has one token for each
    position that is present, T in all.
    """

    token_ids: Tensor  # [B, N] int64, column 0 is the anchor
    position_ids: Tensor  # [B, N] int64
    slots: Tensor  # [B, N] int64, KV slots in both pools
    probabilities: Tensor | None = (
        None  # [B, N-1] float32, the draft's own; None: cut, or not asked
    )
    present: Tensor | None = None  # [B, N] bool, a prefix of each row; None: all positions
    capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.FULL
    topk: int = 1
    custom_mask: Tensor | None = None  # a chain: the backends' own causal path is exact

    def __post_init__(self) -> None:
        super().__init__(SpecInputType.DFLASH_VERIFY)
        self.draft_token_num = self.num_tokens_per_batch = self.token_ids.shape[1]
        self.draft_token = self.flatten(self.token_ids)  # [T]
        self.positions = self.flatten(self.position_ids)  # [T]
        self.out_cache_loc = self.flatten(self.slots)  # [T]

    @property
    def lens(self) -> list[int]:
        """Positions of each request in a forward."""
        if self.present is None:
            return [self.draft_token_num] * self.slots.shape[0]
        return self.present.sum(1).tolist()

    def flatten(self, field: Tensor) -> Tensor:
        """Flatten a [B, N] field to the positions present: [T]."""
        return field.flatten() if self.present is None else field[self.present]

    def unflatten(self, values: Tensor) -> Tensor:
        """Put the values of a forward, [T, ..], at their positions: [B, N, ..], 0 if absent."""
        if self.present is None:
            return values.view(*self.token_ids.shape, *values.shape[1:])
        padded = values.new_zeros(*self.present.shape, *values.shape[1:])
        padded[self.present] = values
        return padded

    def expand(self, requests: Tensor) -> Tensor:
        """Repeat each request's value, [B, ..], for its tokens in a forward: [T, ..]."""
        lens = self.draft_token_num if self.present is None else self.present.sum(1)
        return requests.repeat_interleave(lens, dim=0)

    def first(self, width: int) -> DFlashBlock:
        """Cut the block to its first `width` columns."""
        if width == self.draft_token_num:
            return self
        return DFlashBlock(
            self.token_ids[:, :width], self.position_ids[:, :width], self.slots[:, :width]
        )

    def cut(self, widths: npt.NDArray[np.int64]) -> DFlashBlock:
        """Cut each request's block to a width of its own: [B] int64 in 1..N, on the host."""
        block = self.first(int(widths.max()))
        present = np.arange(block.draft_token_num) < widths[:, None]
        if present.all():
            return block
        return DFlashBlock(
            block.token_ids,
            block.position_ids,
            block.slots,
            present=torch.from_numpy(present).to(block.slots.device),
        )

    def filtered(self, indices: Tensor) -> DFlashBlock:
        """Keep these requests of a whole block."""
        assert self.present is None
        probabilities = None
        if self.probabilities is not None:
            probabilities = self.probabilities[indices]
        return DFlashBlock(
            self.token_ids[indices],
            self.position_ids[indices],
            self.slots[indices],
            probabilities,
        )

    def merged(self, other: DFlashBlock) -> DFlashBlock:
        """Append the requests of another whole block."""
        assert self.present is None
        assert other.present is None
        probabilities = None
        if self.probabilities is not None and other.probabilities is not None:
            probabilities = torch.cat([self.probabilities, other.probabilities])
        return DFlashBlock(
            torch.cat([self.token_ids, other.token_ids]),
            torch.cat([self.position_ids, other.position_ids]),
            torch.cat([self.slots, other.slots]),
            probabilities,
        )

    def forward_batch(
        self, req_pool_indices: Tensor, seq_lens: Tensor, seq_lens_cpu: Tensor
    ) -> ForwardBatch:
        """Make a forward of this block behind contexts of these lengths, [B] int64 each.

        seq_lens_cpu may exceed the true lengths, because backends size buffers by it. FlashInfer
        plans by it and needs the true ones.
        """
        return ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=self.slots.shape[0],
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

        paged_kernel_lens: [B] int64. Both indptrs are where it is, on the device or on the host.
        """
        requests, width = len(req_pool_indices), self.draft_token_num
        device, place = req_to_token.device, paged_kernel_lens.device
        options: Any = {"dtype": torch.int32, "device": place, "pin_memory": place != device}
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
