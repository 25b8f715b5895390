"""What every family's head is: from the hidden states of whole blocks to their drafts."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.model.lm_head import Prediction, Vocabulary


class DraftHead(nn.Module):
    """A family's choice of tokens. It runs inside the draft's graph."""

    # The last bits of a result may differ between ranks. Those of the first rank count.
    rank_local = True
    vocabulary: Vocabulary
    embed: Callable[[Tensor], Tensor]
    width: int

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config

    def bind(self, vocabulary: Vocabulary, embed: Callable[[Tensor], Tensor], width: int) -> None:
        """Take what exists only beside a target.

        embed: token ids, [B] int64 -> embeddings as the draft reads them, [B, H]; width: positions
        N that the draft reads at once, the same for every request.
        """
        self.vocabulary = vocabulary
        self.embed = embed
        self.width = width

    def predict(self, hidden: Tensor, token_ids: Tensor, return_probs: bool) -> Prediction:
        """Choose the drafts of B blocks, one block after another: [B * drafts].

        hidden: [n, H], final-normed, n = B * N; token_ids: [n] int64, anchors and masks;
        return_probs: compute the probability of each draft, too.
        """
        raise NotImplementedError
