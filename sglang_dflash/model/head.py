"""What every family's head is: from the hidden states of whole blocks to their drafts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.method.noise import DraftNoise
from sglang_dflash.model.lm_head import Prediction, Vocabulary

TOKEN_CHUNK = 512  # tokens whose logits are alive at once; bounds memory at large batches


class DraftHead(nn.Module):
    """A family's choice of tokens. It runs inside the draft's graph."""

    # The last bits of a result may differ between ranks. Those of the first rank count.
    rank_local = True
    # It reads the context of the last committed token before each block, `last_context`.
    reads_last_context = False
    last_context: Tensor  # [R, H] by the request's row of `req_to_token`
    vocabulary: Vocabulary
    embed: Callable[[Tensor], Tensor]
    norm: Callable[[Tensor], Tensor]
    width: int

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config

    def bind(
        self,
        vocabulary: Vocabulary,
        embed: Callable[[Tensor], Tensor],
        norm: Callable[[Tensor], Tensor],
        width: int,
    ) -> None:
        """Take what exists only beside a target, and the draft's final norm.

        embed: token ids, [B] int64 -> embeddings as the draft reads them, [B, H]; norm: [n, H] ->
        [n, H]; width: positions N that the draft reads at once, the same for every request.
        """
        self.vocabulary = vocabulary
        self.embed = embed
        self.norm = norm
        self.width = width

    def weights_loaded(self) -> None:
        """Prepare weights as they are in a checkpoint. Called after each load, in place."""

    def make_room(self, rows: int) -> None:
        """Make room for what it keeps of each request. rows: R, of `req_to_token`."""
        if self.reads_last_context:
            like = next(self.parameters())
            self.last_context = like.new_zeros(rows, self.config.hidden_size).detach()

    def after_layer(
        self, layer: int, hidden: Tensor, residual: Tensor, token_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What follows a layer. hidden, residual: [n, H], whose sum is the layer's output.

        token_ids: [n] int64, anchors and masks. Returns the two, whose sum the next layer reads.
        """
        return hidden, residual

    def predict(
        self, hidden: Tensor, token_ids: Tensor, return_probs: bool, noise: DraftNoise
    ) -> Prediction:
        """Choose the drafts of B blocks, one block after another: [B * drafts].

        hidden: [n, H], final-normed, n = B * N; token_ids: [n] int64, anchors and masks;
        return_probs: compute the probability of each draft, too; noise: of these blocks.
        """
        size = max(1, TOKEN_CHUNK // self.width)  # blocks whose logits are alive at once
        states = hidden.view(-1, self.width, hidden.shape[1]).split(size)
        ids = token_ids.view(-1, self.width).split(size)
        parts = [
            self.blocks(*blocks, return_probs, noise.of(slice(i * size, (i + 1) * size)))
            for i, blocks in enumerate(zip(states, ids, strict=True))
        ]
        return Prediction.cat(parts)

    def blocks(
        self, hidden: Tensor, token_ids: Tensor, return_probs: bool, noise: DraftNoise
    ) -> Prediction:
        """The drafts of a few blocks. hidden: [B, N, H]; token_ids: [B, N] int64."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits of this rank's part of the vocabulary: [B, M, H] -> [B, M, columns]."""
        logits = self.scaled(self.vocabulary.logits(hidden.flatten(0, 1)))
        return logits.view(*hidden.shape[:2], self.vocabulary.columns)

    def scaled(self, logits: Tensor) -> Tensor:
        """The LM head's output, multiplied and then capped as the checkpoint says.

        If it says either, the result is float32, in which a cap makes no ties.
        """
        multiplier, cap = self.config.logit_multiplier, self.config.logit_cap
        if multiplier == 1.0 and cap is None:
            return logits
        logits = logits.float() * multiplier
        return logits if cap is None else torch.tanh(logits / cap) * cap
