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
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from torch import Tensor

from sglang_dflash.kernels.argmax import argmax
from sglang_dflash.runtime.constraints import (
    mask_by_grammar,
    penalties_of,
    recount,
    run_custom_processors,
)
from sglang_dflash.runtime.state import DFlashBlock


class TargetDraw:
    """Bends logits as the requests ask, then draws with SGLang's sampler."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._group = get_tp_group()

    def __call__(
        self, logits: Tensor, batch: ScheduleBatch, positions: Tensor, block: DFlashBlock | None
    ) -> Tensor:
        """Token after every row, [rows] int64, equal on all ranks.

        logits: [rows, V], float32 unless `is_argmax`, bent in place; positions: [rows] int64 of the
        rows' inputs; block: whose rows they are, None after a prefill, which has one a request.
        """
        self._bend(logits, batch, block)
        ids = self._draw(logits, batch, positions, block)
        # Ranks hold the same logits up to rounding: a near-tie must not part them.
        return self._group.broadcast(ids, src=0)

    def is_argmax(self, batch: ScheduleBatch) -> bool:
        """Whether a batch asks for nothing but the largest logit of each row."""
        return bool(batch.sampling_info.is_all_greedy) and not _bends(batch)

    def _bend(self, logits: Tensor, batch: ScheduleBatch, block: DFlashBlock | None) -> None:
        if not _bends(batch):
            return
        info, penalised = batch.sampling_info, batch.sampling_info.penalizer_orchestrator
        custom, bias = info.has_custom_logit_processor, info.logit_bias
        tokens = None if block is None else block.token_ids
        rows = logits[:, None] if block is None else block.padded(logits)  # [B, w, V]
        if penalised.is_required:
            penalties = penalties_of(penalised)
            if block is None:
                recount(penalties, batch.reqs, batch.device)
            penalties.apply(rows, tokens)
        if batch.has_grammar:
            mask_by_grammar(rows.flatten(0, 1), batch, tokens)
        if bias is not None:
            rows.add_(bias[:, None])
        if custom:
            run_custom_processors(rows[:, 0], info, batch.reqs)
        if block is not None and block.real is not None:
            logits.copy_(rows[block.real])

    def _draw(
        self, logits: Tensor, batch: ScheduleBatch, positions: Tensor, block: DFlashBlock | None
    ) -> Tensor:
        info = batch.sampling_info
        if info.is_all_greedy:
            return argmax(logits)
        rows = _by_row(info, block)
        probs = torch.softmax(logits / rows.temperatures, dim=-1)
        if rows.sampling_seed is not None:
            each = [req.sampling_params for req in batch.reqs]
            filtered = torch.tensor([p.top_k != TOP_K_ALL or p.top_p != 1.0 for p in each])
            drawn = self._draw_seeded(probs, rows, positions, _spread(filtered, block))
        else:
            needs = info.need_top_p_sampling, info.need_top_k_sampling, info.need_min_p_sampling
            drawn = self._sampler._sample_from_probs(probs, rows, positions, not any(needs)).long()
        return torch.where(rows.top_ks <= 1, argmax(logits), drawn)

    def _draw_seeded(
        self, probs: Tensor, rows: SamplingBatchInfo, positions: Tensor, filtered: Tensor
    ) -> Tensor:
        """Each row by the path of its own parameters, so that its seed alone decides.

        SGLang takes one path for a whole batch, and the two index their noise differently: by
        vocabulary id, or by rank where a filter sorts. Greedy rows are overwritten by the caller.
        """
        drawn = torch.zeros_like(positions)
        for which, sort in ((~filtered, False), (filtered, True)):
            at = which.nonzero().squeeze(1).to(probs.device)
            if len(at) == 0:
                continue
            seed, position = rows.sampling_seed[at], positions[at]
            if sort:
                how = rows.top_ks[at], rows.top_ps[at], rows.min_ps[at], False, seed, position
                ids = top_k_top_p_min_p_sampling_from_probs_torch(probs[at], *how)
            else:
                ids = sampling_from_probs_torch(probs[at], seed, position)
            drawn[at] = ids.long()
        return drawn


def _bends(batch: ScheduleBatch) -> bool:
    """Whether any request of a batch wants logits other than the target's."""
    info = batch.sampling_info
    return bool(
        info.penalizer_orchestrator.is_required
        or batch.has_grammar
        or info.has_custom_logit_processor
        or info.logit_bias is not None
    )


def _spread(requests: Tensor, block: DFlashBlock | None) -> Tensor:
    """What each request has, [B, ..], for all its rows."""
    return requests if block is None else block.spread(requests)


def _by_row(info: SamplingBatchInfo, block: DFlashBlock | None) -> SamplingBatchInfo:
    """Each request's sampling parameters for all its rows."""
    names = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")
    given = {name: t for name in names if (t := getattr(info, name)) is not None}
    return replace(info, **{name: _spread(t, block) for name, t in given.items()})


def log_probabilities(logits: Tensor, temperatures: Tensor, greedy: Tensor) -> Tensor:
    """What SGLang reports, each row by its own parameters: logits are the bent ones, [n, V].

    temperatures: [n, 1]; greedy: [n] bool. A drawn row is the log of its rounded probability.
    """
    plain = torch.log_softmax(logits, dim=-1)
    if not SGLANG_RETURN_ORIGINAL_LOGPROB and not bool(greedy.all()):
        drawn = torch.softmax(logits / temperatures, dim=-1).log()
        plain = torch.where(greedy[:, None], plain, drawn)
    return plain.clamp_(min=torch.finfo(plain.dtype).min)
