"""Sample: the target's token at every position, after a prefill and in a block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from sglang.srt.distributed.parallel_state import get_attn_tp_group
from sglang.srt.layers.sampler import (
    sampling_from_probs_torch,
    top_k_top_p_min_p_sampling_from_probs_torch,
)
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from torch import Tensor

from sglang_dflash.kernels import Kernels
from sglang_dflash.kernels.draw import Sampling
from sglang_dflash.method.block import Block
from sglang_dflash.step.copies import to_device
from sglang_dflash.step.noise import Noise, has_filter, is_sampled


@dataclass(frozen=True)
class SamplingInput:
    """What sampling needs to know of a batch."""

    reqs: list[Req]
    rows: Tensor  # [B] integers, of `req_to_token`
    info: SamplingBatchInfo
    block: Block | None  # whose tokens are sampled; None after a prefill, one token per request
    penalised: bool  # whether any request has a penalty or a least length
    has_grammar: bool  # whether any request has a grammar
    # The tokens of a request's output from an index on, up to the one before the block's anchor.
    output_of: Callable[[Req, int], list[int]]

    @classmethod
    def of(cls, batch: ScheduleBatch, block: Block | None) -> SamplingInput:
        """Read a batch whose requests have all their output, the anchors of `block` among it."""
        info = batch.sampling_info
        penalised = info.penalizer_orchestrator.is_required
        end = None if block is None else -1
        return cls(
            batch.reqs,
            batch.req_pool_indices,
            info,
            block,
            penalised,
            batch.has_grammar,
            output_of=lambda req, start: req.output_ids[start:end],
        )

    def expand(self, requests: Tensor) -> Tensor:
        """Repeat each request's value, [B, ..], for its positions: [T, ..]."""
        return requests if self.block is None else self.block.expand(requests)


class LogitRules(Protocol):
    """What requests ask of the target's logits, such as penalties and grammars."""

    def in_use(self, asked: SamplingInput) -> bool:
        """Whether any request of a batch changes the target's logits."""

    def apply(self, logits: Tensor, asked: SamplingInput) -> None:
        """Change logits in place. logits: [T, V] float32."""

    def one_token_a_step(self, asked: SamplingInput) -> list[bool]:
        """Which requests commit one token per step, because a rule of theirs cannot see drafts.

        [B], or empty if there is no such rule.
        """


class TargetSampler:
    """Applies the requests' logit rules, then draws."""

    def __init__(self, noise: Noise, rules: LogitRules, kernels: Kernels) -> None:
        self._noise = noise
        self._rules = rules
        self._kernels = kernels
        self._group = get_attn_tp_group()  # the ranks that have these requests

    def __call__(self, logits: Tensor, asked: SamplingInput, positions: Tensor) -> Tensor:
        """Draw the token after every position: [T] int64, equal on all ranks.

        logits: [T, V], changed in place, of any float type unless `needs_float32`; positions: [T]
        int64 of the inputs.
        """
        if self._rules.in_use(asked):
            self._rules.apply(logits, asked)
        ids = self._sample(logits, asked, positions)
        # The logits of ranks differ by rounding. At a near-tie, their tokens must still be equal.
        shared: Tensor = self._group.broadcast(ids, src=0)
        return shared

    def is_argmax(self, asked: SamplingInput) -> bool:
        """Whether a batch needs only the largest logit of each position."""
        return bool(asked.info.is_all_greedy) and not self._rules.in_use(asked)

    def needs_float32(self, asked: SamplingInput) -> bool:
        """Whether rules change the logits, or SGLang draws from them."""
        info = asked.info
        by_sglang = info.sampling_seed is not None and not info.is_all_greedy
        return by_sglang or self._rules.in_use(asked)

    def _sample(self, logits: Tensor, asked: SamplingInput, positions: Tensor) -> Tensor:
        info = asked.info
        if not any(map(is_sampled, asked.reqs)):
            return self._kernels.largest(logits).argmax.flatten()
        if info.sampling_seed is None:
            return self.draw(logits, asked, positions, info.temperatures)
        greedy = self._kernels.largest(logits).argmax.flatten()
        info = _by_position(asked)
        probs = torch.softmax(logits / info.temperatures, dim=-1)
        filtered = torch.tensor([has_filter(req.sampling_params) for req in asked.reqs])
        sampled = draw_seeded(probs, info, positions, asked.expand(filtered))
        return torch.where(info.top_ks <= 1, greedy, sampled)

    def draw(
        self, logits: Tensor, asked: SamplingInput, positions: Tensor, temperatures: Tensor
    ) -> Tensor:
        """Draw with the noise of each request: [T] int64. temperatures: [B, 1] float32."""
        info = asked.info
        params = [req.sampling_params for req in asked.reqs if is_sampled(req)]
        filters = any(has_filter(each) or each.min_p > 0 for each in params)
        sampling = Sampling(
            temperatures.flatten(),
            info.top_ks,
            info.top_ps,
            info.min_ps,
            asked.rows,
            self._noise.table.seeds,
            filters,
        )
        requests = None if asked.block is None else asked.block.requests
        drawn: Tensor = self._kernels.draw(logits, sampling, positions, requests)
        return drawn


def draw_seeded(
    probs: Tensor, info: SamplingBatchInfo, positions: Tensor, filtered: Tensor
) -> Tensor:
    """Draw each position by the path of its own parameters, so that only its seed decides: [T].

    SGLang uses one path for a whole batch. The two paths index their noise differently: by
    vocabulary id, or by rank if a filter sorts. The caller overwrites greedy positions.
    filtered: [T] bool, on the host.
    """
    sampled = torch.zeros_like(positions)
    for mask, sort in ((~filtered, False), (filtered, True)):
        at = to_device(mask.nonzero().flatten().tolist(), probs.device)
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


def _by_position(asked: SamplingInput) -> SamplingBatchInfo:
    """Each request's sampling parameters for all its positions."""
    expanded = {}
    for name in ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed"):
        value = getattr(asked.info, name)
        if value is not None:
            expanded[name] = asked.expand(value)
    return replace(asked.info, **expanded)
