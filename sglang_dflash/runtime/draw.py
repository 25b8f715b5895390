"""The target draws a token at every row: the same code after a prefill and at block positions."""

from __future__ import annotations

from dataclasses import replace

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.sampler import (
    SGLANG_RETURN_ORIGINAL_LOGPROB,
    Sampler,
    sampling_from_probs_torch,
    top_k_top_p_min_p_sampling_from_probs_torch,
)
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from torch import Tensor

from sglang_dflash.cpu.argmax import argmax
from sglang_dflash.runtime.constraints import (
    mask_by_grammar,
    penalties_of,
    recount,
    run_custom_processors,
)


class TargetDraw:
    """Bends logits as the requests ask, then draws with SGLang's sampler."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._group = get_tp_group()

    def __call__(
        self, logits: Tensor, batch: ScheduleBatch, positions: Tensor, block: Tensor | None
    ) -> Tensor:
        """Token after every row, equal on all ranks.

        logits: [B * w, V] float32, bent in place; positions: [B, w] int64 of the rows' inputs;
        block: [B, w] int64, None after a prefill (w = 1). Returns [B, w] int64.
        """
        self._bend(logits, batch, block)
        ids = self._draw(logits, batch, positions).view_as(positions)
        # Ranks hold the same logits up to rounding: a near-tie must not part them.
        return self._group.broadcast(ids, src=0)

    def _bend(self, logits: Tensor, batch: ScheduleBatch, block: Tensor | None) -> None:
        info = batch.sampling_info
        by_row = logits.unflatten(0, (len(batch.reqs), -1))  # [B, w, V]
        if info.penalizer_orchestrator.is_required:
            penalties = penalties_of(info.penalizer_orchestrator)
            if block is None:
                recount(penalties, batch.reqs, batch.device)
            penalties.apply(by_row, block)
        if batch.has_grammar:
            mask_by_grammar(logits, batch, block)
        if info.logit_bias is not None:
            by_row.add_(info.logit_bias[:, None])
        if info.has_custom_logit_processor:
            run_custom_processors(by_row[:, 0], info, batch.reqs)

    def _draw(self, logits: Tensor, batch: ScheduleBatch, positions: Tensor) -> Tensor:
        info = batch.sampling_info
        if info.is_all_greedy:
            return argmax(logits)
        rows = _repeat(info, positions.shape[1])
        probs = torch.softmax(logits / rows.temperatures, dim=-1)
        if rows.sampling_seed is not None:
            drawn = self._draw_seeded(probs, rows, batch.reqs, positions)
        else:
            needs = info.need_top_p_sampling, info.need_top_k_sampling, info.need_min_p_sampling
            at = positions.flatten()
            drawn = self._sampler._sample_from_probs(probs, rows, at, not any(needs)).long()
        return torch.where(rows.top_ks <= 1, argmax(logits), drawn)

    def _draw_seeded(
        self, probs: Tensor, rows: SamplingBatchInfo, reqs: list[Req], positions: Tensor
    ) -> Tensor:
        """Each row by the path of its own parameters, so that its seed alone decides.

        SGLang takes one path for a whole batch, and the two index their noise differently: by
        vocabulary id, or by rank where a filter sorts. Greedy rows are overwritten by the caller.
        """
        filtered = torch.tensor(
            [r.sampling_params.top_k != TOP_K_ALL or r.sampling_params.top_p != 1.0 for r in reqs]
        ).repeat_interleave(positions.shape[1])
        drawn = positions.new_zeros(probs.shape[0])
        for which, sort in ((~filtered, False), (filtered, True)):
            at = which.nonzero().squeeze(1).to(probs.device)
            if len(at) == 0:
                continue
            seed, position = rows.sampling_seed[at], positions.flatten()[at]
            if sort:
                filters = rows.top_ks[at], rows.top_ps[at], rows.min_ps[at], False
                ids = top_k_top_p_min_p_sampling_from_probs_torch(
                    probs[at], *filters, seed, position
                )
            else:
                ids = sampling_from_probs_torch(probs[at], seed, position)
            drawn[at] = ids.long()
        return drawn


def _repeat(info: SamplingBatchInfo, width: int) -> SamplingBatchInfo:
    """Each request's sampling parameters for all rows of its block."""
    names = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")
    given = {name: t for name in names if (t := getattr(info, name)) is not None}
    rows = {name: t.repeat_interleave(width, dim=0) for name, t in given.items()}
    return replace(info, **rows)


def log_probabilities(logits: Tensor, temperatures: Tensor, greedy: Tensor) -> Tensor:
    """What SGLang reports, each row by its own parameters: logits are the bent ones, [n, V].

    temperatures: [n, 1]; greedy: [n] bool. A drawn row is the log of its rounded probability.
    """
    plain = torch.log_softmax(logits, dim=-1)
    if not SGLANG_RETURN_ORIGINAL_LOGPROB and not bool(greedy.all()):
        drawn = torch.softmax(logits / temperatures, dim=-1).log()
        plain = torch.where(greedy[:, None], plain, drawn)
    return plain.clamp_(min=torch.finfo(plain.dtype).min)
