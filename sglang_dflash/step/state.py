"""The state that a batch carries from one step to the next."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType
from torch import Tensor

from sglang_dflash.step.policies import Drafted


@dataclass
class DFlashState(SpecInput):
    """`ScheduleBatch.spec_info` between steps. SGLang filters and merges it with its requests."""

    anchors: Tensor  # [B] int64, the last committed token of each request
    drafted: Drafted | None = None  # the next block, if it is drafted already

    def __post_init__(self) -> None:
        super().__init__(SpecInputType.DFLASH_DRAFT)

    def get_spec_adjust_token_coefficient(self) -> tuple[int, int]:
        return 1, 1

    def filter_batch(self, new_indices: Tensor, has_been_filtered: bool = True) -> None:
        """Keep these requests. The state is never filtered before, so the flag is ignored."""
        self.anchors = self.anchors[new_indices]
        if self.drafted is not None:
            self.drafted = Drafted(self.drafted.block.filtered(new_indices))

    def merge_batch(self, other: DFlashState) -> None:
        """Append other requests. Unless both sides are drafted, all are drafted again."""
        self.anchors = torch.cat([self.anchors, other.anchors])
        if self.drafted is None or other.drafted is None:
            self.drafted = None
        else:
            self.drafted = Drafted(self.drafted.block.merged(other.drafted.block))
