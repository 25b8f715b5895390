"""Rules that change the target's logits: penalties, grammars, logit bias, custom processors."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import torch
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPenalizerOrchestrator,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from torch import Tensor

from sglang_dflash.core.penalties import MinLength, Penalties, Penalty


def has_rules(batch: ScheduleBatch) -> bool:
    """Whether any request of a batch changes the target's logits."""
    info = batch.sampling_info
    return bool(
        info.penalizer_orchestrator.is_required
        or batch.has_grammar
        or info.has_custom_logit_processor
        or info.logit_bias is not None
    )


def wrong_processor(text: str) -> str | None:
    """Why a custom logit processor cannot be made of its text, or None."""
    try:
        made = CustomLogitProcessor.from_str(text)
    except Exception as error:  # noqa: BLE001 - user code must not end the scheduler
        return f"custom_logit_processor cannot be read. {type(error).__name__}: {error}"
    return None if callable(made) else "custom_logit_processor is no function."


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


def mask_by_grammar(logits: Tensor, batch: ScheduleBatch, block: Tensor | None) -> None:
    """Ban in place the tokens that each request's grammar forbids after its output and drafts.

    logits: [B * w, V]; block: [B, w] int64 on device, None in prefill (w = 1). A draft that the
    grammar forbids ends the walk: the target cannot draw it, so nothing behind it is accepted.
    """
    width = 1 if block is None else block.shape[1]
    tokens = [[0]] * len(batch.reqs) if block is None else block.tolist()
    first = next(req.grammar for req in batch.reqs if req.grammar is not None)
    mask = first.allocate_vocab_mask(
        vocab_size=batch.sampling_info.vocab_size, batch_size=len(tokens) * width, device="cpu"
    )
    for i, (req, drafts) in enumerate(zip(batch.reqs, tokens, strict=True)):
        if req.grammar is not None and not req.grammar.finished:
            _walk(req.grammar, drafts, mask, i * width)
    dense = logits.contiguous()  # SGLang's kernel takes the width of a row for its stride
    first.apply_vocab_mask(logits=dense, vocab_mask=first.move_vocab_mask(mask, logits.device))
    if dense is not logits:
        logits.copy_(dense)


def _walk(grammar: BaseGrammarObject, tokens: list[int], mask: Tensor, row: int) -> None:
    """Fill mask rows as long as the drafts are legal, then roll the grammar back."""
    walked = 0
    while not grammar.is_terminated():
        grammar.fill_vocab_mask(mask, row + walked)
        if walked + 1 == len(tokens):
            break
        token = tokens[walked + 1]
        if not int(mask[row + walked, token // 32]) >> token % 32 & 1:
            break
        grammar.accept_token(token)
        walked += 1
    if walked:
        grammar.rollback(walked)


def run_custom_processors(logits: Tensor, info: SamplingBatchInfo, reqs: list[Req]) -> None:
    """Let each request's own processor change its logits in place. logits: [B, V].

    SGLang's own processors assert that all requests of a call have the same parameters, so each
    request has its own call.
    """
    for processor, mask in info.custom_logit_processor.values():
        for i in mask.nonzero().flatten().tolist():
            error = _run(processor, logits[i], info.custom_params[i])
            if error is not None:
                reqs[i].to_finish = FINISH_ABORT(error, HTTPStatus.BAD_REQUEST)


def _run(processor: Any, logits: Tensor, params: Any) -> str | None:
    """Change the logits of one request, [V], in place. Returns the error that ends the request."""
    try:
        changed = processor(logits[None].clone(), [params])
        if changed.shape != (1, *logits.shape):
            raise ValueError(f"it returned logits of shape {tuple(changed.shape)}")
        logits.copy_(changed[0])
    except Exception as error:  # noqa: BLE001 - user code must not end the scheduler
        return f"The custom logit processor failed: {error!r}"[:500]
    return None
