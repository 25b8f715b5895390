"""The draft's vocabulary: token embeddings in, the best of a vocabulary-parallel LM head out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from torch import Tensor, nn
from torch.nn import functional as F

from sglang_dflash.kernels import Kernels
from sglang_dflash.kernels.argmax import Largest
from sglang_dflash.method.noise import DraftNoise
from sglang_dflash.model.target_parts import lm_head, logits_processor, token_embedding

ROWS_AT_ONCE = 128  # of logits


class Prediction(NamedTuple):
    """A token for each position."""

    picks: Tensor  # [n, C + 1] int64 of the target's vocabulary: at each share, then the draft
    probabilities: Tensor | None  # [n] float32, of the drafts, if asked for

    @property
    def ids(self) -> Tensor:
        """The drafts, [n] int64."""
        return self.picks[:, -1]

    @classmethod
    def cat(cls, parts: list[Prediction]) -> Prediction:
        """The parts one after another."""
        return parts[0] if len(parts) == 1 else cls._join(parts, torch.cat)

    @classmethod
    def of_blocks(cls, positions: list[Prediction]) -> Prediction:
        """The drafts of B blocks, n = B * M, of those at each of M positions, B each."""
        return cls._join(positions, lambda each: torch.stack(each, dim=1).flatten(0, 1))

    @classmethod
    def _join(cls, parts: list[Prediction], join: Callable[[list[Tensor]], Tensor]) -> Prediction:
        known = [part.probabilities for part in parts if part.probabilities is not None]
        return cls(join([part.picks for part in parts]), join(known) if known else None)

    def pack(self) -> Tensor:
        """One tensor: the picks, [n, C + 1] int64, before them the bits of the probabilities."""
        if self.probabilities is None:
            return self.picks
        bits = self.probabilities.view(torch.int32).long()
        return torch.cat([bits[:, None], self.picks], dim=1)

    @classmethod
    def unpack(cls, columns: Tensor, with_probs: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """The views of packed columns, [C + 1, ..] or one more: drafts, shares, probabilities."""
        if not with_probs:
            return columns[-1], columns[:-1], None
        probabilities = columns[0].int().view(torch.float32)
        # NaN: the draft's activations overflowed
        return columns[-1], columns[1:-1], probabilities.nan_to_num(0.0)


class Candidates(NamedTuple):
    """The tokens with the largest logits of each position, by ascending id."""

    ids: Tensor  # [n, k] int64, in the target's vocabulary
    logits: Tensor  # [n, k] float32


class Likeliest(NamedTuple):
    """The most probable tokens of each position, by falling probability."""

    ids: Tensor  # [n, k] int64, in the target's vocabulary
    log_probs: Tensor  # [n, k] float32, of the whole vocabulary


class Vocabulary:
    """The draft's embedding and LM head: its checkpoint's own, else references to the target's.

    This is not an nn.Module, so that the draft neither registers nor loads the target's weights.
    """

    def __init__(
        self,
        target: Any,
        kernels: Kernels,
        embedding: nn.Module | None = None,
        own_head: VocabParallelEmbedding | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        """offsets: [draft vocabulary] int64, target id - draft id."""
        head: Any = lm_head(target) if own_head is None else own_head
        of_target: Any = token_embedding(target)
        self.embed_as_target = of_target
        self.embed = of_target if embedding is None else embedding
        self.target_size: int = of_target.num_embeddings
        self.lm_head = head
        self._processor = logits_processor(target)
        self.kernels = kernels
        self._offsets = offsets
        self._group = get_tp_group()
        self._ranks = self._group.world_size
        self.whole_head = isinstance(head, nn.Embedding)  # Gemma's tied head, on every rank
        if self.whole_head:
            self.columns = head.num_embeddings
            self.first_id = 0
            self._ranks = 1
        else:
            shard = head.shard_indices
            self.columns = shard.num_org_elements  # padding and added rows come after these
            self.first_id = shard.org_vocab_start_index
        if offsets is None:  # rows beyond the target's tokens are padding
            self.columns = max(0, min(self.columns, self.target_size - self.first_id))
        # [columns] int32, the token of each
        self.ids = torch.empty(
            self.columns, dtype=torch.int32, device=next(target.parameters()).device
        )
        self.read_offsets()

    def read_offsets(self) -> None:
        """Follow the offsets, which may have changed."""
        ours = torch.arange(self.columns, device=self.ids.device) + self.first_id
        self.ids.copy_(self._target_ids(ours))

    def logits(self, hidden: Tensor) -> Tensor:
        """The LM head's output for this rank's part of the vocabulary: [n, H] -> [n, columns]."""
        logits: Tensor = self._processor._compute_lm_head(hidden, self.lm_head)
        return logits[:, : self.columns]

    def largest(self, logits: Tensor, return_probs: bool, noise: DraftNoise) -> Prediction:
        """The token of the largest logit and noise, the lowest id on a tie, the same on every rank.

        logits: [B * M, columns] of this rank.
        """
        return self._predicted(self.kernels.largest(logits, return_probs, noise))

    def biased_largest(
        self, logits: Tensor, latent: Tensor, weight: Tensor, return_probs: bool, noise: DraftNoise
    ) -> Prediction:
        """As `largest`, of `logits + latent @ weight.T`.

        latent: [n, r]; weight: [columns, r] of this rank.
        """
        found = self.kernels.biased_largest(logits, latent, weight, return_probs, noise)
        return self._predicted(found)

    def _predicted(self, found: Largest) -> Prediction:
        index, _, sum_exp = self._reduce_over_ranks(found)
        probabilities = None if sum_exp is None else sum_exp[:, -1].reciprocal()
        return Prediction(self._target_ids(index), probabilities)

    def _reduce_over_ranks(self, found: Largest) -> Largest:
        """Ranks exchange a few numbers per token, never the logits."""
        index, value, sum_exp = found
        if self._ranks == 1:
            return found
        # float32 holds ids below 2**24 exactly
        ours = [value, (index + self.first_id).float()] + ([] if sum_exp is None else [sum_exp])
        ranks = self._group.all_gather(torch.stack(ours)[None], dim=0)  # [ranks, 2 or 3, n, C]
        values = ranks[:, 0]
        first = values.argmax(dim=0, keepdim=True)  # first rank of a tie: lowest ids
        value = values.gather(0, first)
        index = ranks[:, 1].gather(0, first)[0].long()
        if sum_exp is not None:
            sum_exp = (ranks[:, 2] * (values - value).exp()).sum(dim=0)
        return Largest(index, value[0], sum_exp)

    def candidates(self, logits: Tensor, count: int) -> Candidates:
        """The tokens of the largest logits, the same on every rank.

        logits: [n, columns] of this rank; count: k. Ranks exchange k numbers per token, never the
        logits. Equal logits on lower ranks come first. The order of equal logits on one rank is
        open, as it is in `torch.topk`.
        """
        ours = min(count, self.columns)  # a rank may have fewer
        index = logits.topk(ours, dim=1, sorted=False).indices.sort(dim=1).values
        values = logits.gather(1, index).float()
        if self._ranks == 1:
            return Candidates(self._target_ids(index), values)
        # float32 holds ids below 2**24 exactly
        known = torch.cat([values, (index + self.first_id).float()], dim=1).view(-1, 2, ours)
        known = F.pad(known, (0, count - ours), value=float("-inf"))
        ranks = self._group.all_gather(known[None], dim=0)  # [ranks, n, 2, k]
        # [n, ranks * k] each, by ascending id
        values, ids = ranks.permute(2, 1, 0, 3).flatten(2).unbind(0)
        order = values.sort(dim=1, descending=True, stable=True).indices
        first = order[:, :count].sort(dim=1).values
        return Candidates(self._target_ids(ids.gather(1, first).long()), values.gather(1, first))

    def likeliest(self, logits: Tensor, count: int) -> Likeliest:
        """The most probable tokens, the same on every rank. logits: as in `candidates`; count: k"""
        ids, values = self.candidates(logits, count)
        order = values.sort(dim=1, descending=True, stable=True).indices
        # The copies in float32 are of a few rows at a time.
        parts = [part.float().logsumexp(dim=1) for part in logits.split(ROWS_AT_ONCE)]
        partition = torch.cat(parts)
        if self._ranks > 1:
            partition = self._group.all_gather(partition[None], dim=0).logsumexp(dim=0)
        return Likeliest(ids.gather(1, order), values.gather(1, order) - partition[:, None])

    def scores(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """The LM head's output for some tokens alone, the same on every rank.

        hidden: [.., m, H]; ids: [.., k] int64 -> [.., m, k] float32. Ranks exchange these alone.
        The weight's rows are read as they are: a family that calls this has `reads_head`.
        """
        assert self._offsets is None, "the draft has the target's vocabulary"
        row = ids - self.first_id
        rows = F.embedding(row.clamp(0, max(0, self.columns - 1)), self.lm_head.weight)
        scores = hidden.float() @ rows.float().mT
        if self._ranks == 1:
            return scores
        ours = (row >= 0) & (row < self.columns)
        summed: Tensor = self._group.all_reduce(scores.masked_fill(~ours[..., None, :], 0.0))
        return summed

    def fit_input(self, table: Tensor) -> None:
        """Have a row of a table for each token of the target.

        Vocabularies of draft and target may differ in their padding. Further rows are zero.
        """
        _fit_rows(table, 0, self.target_size)

    def fit_output(self, weight: Tensor) -> None:
        """Keep this rank's rows of a matrix onto the logits, for `biased_largest`."""
        _fit_rows(weight, self.first_id, self.first_id + self.columns)

    def _target_ids(self, ids: Tensor) -> Tensor:
        return ids if self._offsets is None else ids + self._offsets[ids]

    def of_first_rank(self, values: Tensor) -> Tensor:
        """The first rank's values, on every rank. They may differ in their last bits."""
        if self._group.world_size == 1:
            return values
        gathered: Tensor = self._group.all_gather(values[None], dim=0)
        return gathered[0]


def _fit_rows(weight: Tensor, start: int, end: int) -> None:
    """Keep some rows of a parameter, now and when it is loaded again."""
    if (start, end) == (0, len(weight)):
        return

    def load(parameter: Tensor, whole: Tensor) -> None:
        rows = whole[start:end]
        parameter.data[: len(rows)].copy_(rows)

    rows = weight.data[start:end]
    weight.data = F.pad(rows, (0, 0, 0, end - start - len(rows)))
    weight.weight_loader = load  # type: ignore[attr-defined]  # SGLang's own name
