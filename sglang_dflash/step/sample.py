"""Sample: the target's token at every position, after a prefill and in a block."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.sampler import (
    Sampler,
    sampling_from_probs_torch,
    top_k_top_p_min_p_sampling_from_probs_torch,
)
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from torch import Tensor

from sglang_dflash.kernels import Kernels
from sglang_dflash.method.block import Block


class LogitRules(Protocol):
    """What requests ask of the target's logits, such as penalties and grammars."""

    def in_use(self, batch: ScheduleBatch) -> bool:
        """Whether any request of a batch changes the target's logits."""

    def apply(self, logits: Tensor, batch: ScheduleBatch, block: Block | None) -> None:
        """Change logits in place. logits: [T, V] float32; block: as `TargetSampler` takes it."""

    def one_token_a_step(self, batch: ScheduleBatch) -> list[bool]:
        """Which requests commit one token per step, because a rule of theirs cannot see drafts.

        [B], or empty if there is no such rule.
        """

    def count(self, batch: ScheduleBatch, tokens: Tensor, num_accepted: Tensor) -> None:
        """Count the anchor and the accepted drafts of each block among the output.

        tokens: [B, w] int64; num_accepted: [B] int64, on the device.
        """


class TargetSampler:
    """Applies the requests' logit rules, then draws with SGLang's sampler."""

    def __init__(self, sampler: Sampler, rules: LogitRules, kernels: Kernels) -> None:
        self._sampler = sampler
        self._rules = rules
        self._kernels = kernels
        self._group = get_tp_group()

    def __call__(
        self, logits: Tensor, batch: ScheduleBatch, positions: Tensor, block: Block | None
    ) -> Tensor:
        """Draw the token after every position: [T] int64, equal on all ranks.

        logits: [T, V], float32 unless `is_argmax`, changed in place; positions: [T] int64 of the
        inputs; block: the block of these positions, or None after a prefill, which has one position
        per request.
        """
        if self._rules.in_use(batch):
            self._rules.apply(logits, batch, block)
        ids = self._sample(logits, batch, positions, block)
        # The logits of ranks differ by rounding. At a near-tie, their tokens must still be equal.
        shared: Tensor = self._group.broadcast(ids, src=0)
        return shared

    def is_argmax(self, batch: ScheduleBatch) -> bool:
        """Whether a batch needs only the largest logit of each position."""
        return bool(batch.sampling_info.is_all_greedy) and not self._rules.in_use(batch)

    def _sample(
        self, logits: Tensor, batch: ScheduleBatch, positions: Tensor, block: Block | None
    ) -> Tensor:
        greedy = self._kernels.largest(logits).argmax
        info = batch.sampling_info
        if info.is_all_greedy:
            return greedy
        info = _by_position(info, block)
        probs = torch.softmax(logits / info.temperatures, dim=-1)
        if info.sampling_seed is not None:
            each = [req.sampling_params for req in batch.reqs]
            filtered = torch.tensor([p.top_k != TOP_K_ALL or p.top_p != 1.0 for p in each])
            sampled = self._sample_seeded(probs, info, positions, _expand(filtered, block))
        else:
            filters = info.need_top_p_sampling, info.need_top_k_sampling, info.need_min_p_sampling
            simple = not any(filters)
            sampled = self._sampler._sample_from_probs(probs, info, positions, simple).long()
        return torch.where(info.top_ks <= 1, greedy, sampled)

    def _sample_seeded(
        self, probs: Tensor, info: SamplingBatchInfo, positions: Tensor, filtered: Tensor
    ) -> Tensor:
        """Draw each position by the path of its own parameters, so that only its seed decides.

        SGLang uses one path for a whole batch. The two paths index their noise differently: by
        vocabulary id, or by rank if a filter sorts. The caller overwrites greedy positions.
        """
        sampled = torch.zeros_like(positions)
        for mask, sort in ((~filtered, False), (filtered, True)):
            at = mask.nonzero().squeeze(1).to(probs.device)
            if len(at) == 0:
                continue
            seed, position = info.sampling_seed[at], positions[at]
            if sort:
                ids = top_k_top_p_min_p_sampling_from_probs_torch(
                    probs[at],
                    top_ks=info.top_ks[at],
                    top_ps=info.top_ps[at],
                    min_ps=info.min_ps[at],
                    need_min_p_sampling=False,
                    sampling_seed=seed,
                    positions=position,
                )
            else:
                ids = sampling_from_probs_torch(probs[at], seed, position)
            sampled[at] = ids.long()
        return sampled


def _expand(requests: Tensor, block: Block | None) -> Tensor:
    """Repeat each request's value, [B, ..], for its positions."""
    return requests if block is None else block.expand(requests)


def _by_position(info: SamplingBatchInfo, block: Block | None) -> SamplingBatchInfo:
    """Each request's sampling parameters for all its positions."""
    expanded = {}
    for name in ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed"):
        value = getattr(info, name)
        if value is not None:
            expanded[name] = _expand(value, block)
    return replace(info, **expanded)
