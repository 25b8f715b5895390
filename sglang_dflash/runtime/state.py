"""What travels between steps, and what a forward of the block carries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.attention.utils import create_flashinfer_kv_indices_triton
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType, SpeculativeAlgorithm
from torch import Tensor

from sglang_dflash.core.width import Array


def to_host(tensor: Tensor) -> tuple[Tensor, torch.Event]:
    """A copy on the host, queued, and when it is done."""
    copy = tensor.to("cpu", non_blocking=True)  # pinned memory, if from a GPU
    done = torch.get_device_module(tensor.device).Event()
    done.record()
    return copy, done


@dataclass
class DFlashState(SpecInput):
    """Carried by `ScheduleBatch.spec_info` between steps."""

    anchors: Tensor  # [B] int64, the last committed token of each row
    block: DFlashBlock | None = None  # that follows, where it is drafted already

    def __post_init__(self) -> None:
        super().__init__(SpecInputType.DFLASH_DRAFT)

    def get_spec_adjust_token_coefficient(self) -> tuple[int, int]:
        return 1, 1

    def filter_batch(self, new_indices: Tensor, has_been_filtered: bool = True) -> None:
        """Keep these rows. Rows are never filtered beforehand, whatever the flag says."""
        self.anchors = self.anchors[new_indices]
        self.block = self.block and self.block.each(lambda field: field[new_indices])

    def merge_batch(self, other: DFlashState) -> None:
        self.anchors = torch.cat([self.anchors, other.anchors])
        self.block = self.block and other.block and self.block.merged(other.block)


@dataclass
class DFlashBlock(SpecInput):
    """A block of N tokens a request in TARGET_VERIFY mode, for the draft and for the target.

    The fields below `slots` are those that SGLang's attention backends and graph runner read.
    """

    token_ids: Tensor  # [B, N] int64, column 0 is the anchor
    position_ids: Tensor  # [B, N] int64
    slots: Tensor  # [B, N] int64, KV slots in both pools
    probability: Tensor | None = None  # [B, N-1] float32, of each draft, where they are weighed
    real: Tensor | None = None  # [B, N] bool, what a forward holds of it: a prefix a row, None: all
    capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.FULL
    topk: int = 1
    custom_mask: Tensor | None = None  # a chain: the backends' own causal path is exact

    def __post_init__(self) -> None:
        super().__init__(SpecInputType.DFLASH_VERIFY)
        self.draft_token_num = self.num_tokens_per_batch = self.token_ids.shape[1]
        self.draft_token = self.rows(self.token_ids)
        self.positions = self.rows(self.position_ids)
        self.out_cache_loc = self.rows(self.slots)

    @property
    def lens(self) -> list[int]:
        """How many positions of each request a forward holds."""
        if self.real is None:
            return [self.draft_token_num] * self.slots.shape[0]
        return self.real.sum(1).tolist()

    def rows(self, field: Tensor) -> Tensor:
        """Of every position, [B, N], what a forward holds, flat."""
        return field.flatten() if self.real is None else field[self.real]

    def padded(self, rows: Tensor) -> Tensor:
        """What a forward gave, [rows, ..], at every position: [B, N, ..], zeros where nothing."""
        if self.real is None:
            return rows.view(*self.token_ids.shape, *rows.shape[1:])
        padded = rows.new_zeros(*self.real.shape, *rows.shape[1:])
        padded[self.real] = rows
        return padded

    def spread(self, requests: Tensor) -> Tensor:
        """Of each request, [B, ..], for its rows in a forward: [rows, ..]."""
        lens = self.draft_token_num if self.real is None else self.real.sum(1)
        return requests.repeat_interleave(lens, dim=0)

    def first(self, width: int) -> DFlashBlock:
        """The block, and what its drafts weigh, cut to the first `width` columns."""
        if width == self.draft_token_num:
            return self
        return self.each(lambda field: field[:, :width])

    def cut(self, widths: Array) -> DFlashBlock:
        """Of each request the first so many positions. widths: [B] int64 in 1..N, on the host."""
        block = self.first(int(widths.max()))
        real = np.arange(block.draft_token_num) < widths[:, None]
        if real.all():
            return block
        return DFlashBlock(*block._fields(), torch.from_numpy(real).to(block.slots.device))

    def merged(self, other: DFlashBlock) -> DFlashBlock:
        both = zip(self._fields(), other._fields(), strict=True)
        return DFlashBlock(*(two[0] if two[0] is None else torch.cat(two) for two in both))

    def each(self, of: Callable[[Tensor], Tensor]) -> DFlashBlock:
        return DFlashBlock(*(t if t is None else of(t) for t in self._fields()))

    def _fields(self) -> tuple[Any, ...]:
        return self.token_ids, self.position_ids, self.slots, self.probability

    def forward_batch(
        self, req_pool_indices: Tensor, seq_lens: Tensor, seq_lens_cpu: Tensor
    ) -> ForwardBatch:
        """A forward of this block behind contexts of these lengths, [B] int64 each.

        seq_lens_cpu may be more than the true lengths: backends size buffers by it. FlashInfer
        plans by it, so there they are the true ones.
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
        """FlashInfer's view of prefix and block: KV indices, KV indptr, query indptr, no mask.

        paged_kernel_lens: [B], on the device, or on the host, where both indptrs then are, too.
        """
        rows, width, device = len(req_pool_indices), self.draft_token_num, req_to_token.device
        there = paged_kernel_lens.device
        options: Any = {"dtype": torch.int32, "device": there, "pin_memory": there != device}
        kv_indptr = torch.zeros(rows + 1, **options)
        kv_indptr[1:] = (paged_kernel_lens + width).cumsum(0)
        qo_indptr = torch.arange(0, (rows + 1) * width, width, **options)
        starts = kv_indptr.to(device, non_blocking=True)
        kv_indices = starts.new_empty(paged_kernel_lens_sum + width * rows)
        table = (req_to_token, req_pool_indices, starts.diff(), starts, None, kv_indices)
        create_flashinfer_kv_indices_triton[(rows,)](*table, req_to_token.stride(0))
        return kv_indices, kv_indptr, qo_indptr, None
