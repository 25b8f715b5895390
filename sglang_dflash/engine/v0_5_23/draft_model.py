"""The draft as SGLang's worker calls it: its forward returns the tokens that it drafts."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch import Tensor

from sglang_dflash.model import draft


class DFlashDraftModel(draft.DFlashDraftModel):
    """The same model. The worker asks for hidden states, and applies a head to them.

    Here the family's head is inside of the forward, and so of its graph. The worker's own heads
    are off.
    """

    candidate_selector = lilicorr = None

    def set_block_size(self, block_size: int) -> None:
        """`bind` says the width."""

    def load_kv_cache_scales(self, path: str) -> None:
        """They are the target's, whose KV is in FP8."""

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: ForwardBatch,
        input_embeds: Any = None,
        **_: Any,
    ) -> LogitsProcessorOutput:
        """Draft blocks: [B * N, C + 1] int64 as `hidden_states`, the anchors before their drafts.

        A draft that predicts from the anchor has one draft more than the worker verifies.

        input_embeds: the worker's, which know neither a mask of its own nor a scale.
        """
        width = self.head.width
        output = super().forward(input_ids, positions, forward_batch)
        packed = output.hidden_states
        anchors = input_ids.view(-1, width)[:, :1, None].expand(-1, 1, packed.shape[1])
        drafts = packed.view(len(anchors), -1, packed.shape[1])[:, : width - 1]
        output.hidden_states = torch.cat([anchors, drafts], dim=1).flatten(0, 1)
        return output


EntryClass = DFlashDraftModel
