"""Rules that change the target's logits: penalties, grammars, logit bias, custom processors."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPenalizerOrchestrator,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)
from torch import Tensor

from sglang_dflash.logits.grammar import follows_drafts, has_mask, mask_by_grammar
from sglang_dflash.logits.penalties import MinLength, Penalties, Penalty
from sglang_dflash.logits.processors import run_custom_processors
from sglang_dflash.method.block import Block


class RequestedRules:
    """The rules that the requests of a batch ask for, by SGLang's own objects."""

    def in_use(self, batch: ScheduleBatch) -> bool:
        info = batch.sampling_info
        return bool(
            info.penalizer_orchestrator.is_required
            or (batch.has_grammar and any(has_mask(req) for req in batch.reqs))
            or info.has_custom_logit_processor
            or info.logit_bias is not None
        )

    def apply(self, logits: Tensor, batch: ScheduleBatch, block: Block | None) -> None:
        info = batch.sampling_info
        tokens = None if block is None else block.token_ids
        spread = logits[:, None] if block is None else block.unflatten(logits)  # [B, w, V]
        if info.penalizer_orchestrator.is_required:
            penalties = penalties_of(info.penalizer_orchestrator)
            if block is None:
                recount(penalties, batch.reqs, batch.device)
            penalties.apply(spread, tokens)
        if batch.has_grammar:
            mask_by_grammar(spread.flatten(0, 1), batch, tokens)
        if info.logit_bias is not None:
            spread.add_(info.logit_bias[:, None])
        if info.has_custom_logit_processor:
            run_custom_processors(spread[:, 0], info, batch.reqs)
        if block is not None and block.ragged is not None:
            logits.copy_(block.flatten(spread))  # `unflatten` made a copy

    def one_token_a_step(self, batch: ScheduleBatch) -> list[bool]:
        """Those with a custom processor, and those whose grammar cannot follow drafts.

        A processor is user code that reads the request, so it runs only on the anchor's logits.
        Such a grammar masks only the anchor's logits.
        """
        custom = batch.sampling_info.has_custom_logit_processor
        alone: list[bool] = []
        if not custom and not batch.has_grammar:
            return alone
        for req in batch.reqs:
            has_processor = custom and req.custom_logit_processor is not None
            alone.append(has_processor or not follows_drafts(req))
        return alone

    def count(self, batch: ScheduleBatch, tokens: Tensor, num_accepted: Tensor) -> None:
        orchestrator = batch.sampling_info.penalizer_orchestrator
        if orchestrator.is_required:
            penalties_of(orchestrator).advance(tokens, num_accepted + 1)


def penalties_of(orchestrator: BatchedPenalizerOrchestrator) -> Penalties:
    """A view of the tensors of SGLang's penalizers, without those that are not required."""

    def prepared(penalizer: type) -> Any:
        held = orchestrator.penalizers.get(penalizer)
        return held if held is not None and held.is_prepared() else None

    penalties = Penalties()
    if (held := prepared(BatchedFrequencyPenalizer)) is not None:
        state, step = held.cumulated_frequency_penalties, held.frequency_penalties
        penalties.frequency = Penalty(state, step)
    if (held := prepared(BatchedPresencePenalizer)) is not None:
        state, step = held.cumulated_presence_penalties, held.presence_penalties
        penalties.presence = Penalty(state, step)
    if (held := prepared(BatchedRepetitionPenalizer)) is not None:
        state, step = held.cumulated_repetition_penalties, held.repetition_penalties
        penalties.repetition = Penalty(state, step)
    if (held := prepared(BatchedMinNewTokensPenalizer)) is not None:
        penalties.min_length = MinLength(
            held.len_output_tokens, held.min_new_tokens, held.stop_token_penalties
        )
    return penalties


def recount(penalties: Penalties, reqs: list[Req], device: str) -> None:
    """Count the earlier output of requests that were retracted and are prefilled again.

    SGLang resets its penalizers at every prefill.
    """
    outputs = [list(req.output_ids) for req in reqs]
    if longest := max(map(len, outputs)):
        tokens = torch.tensor([ids + [0] * (longest - len(ids)) for ids in outputs], device=device)
        penalties.advance(tokens, torch.tensor([len(ids) for ids in outputs], device=device))
