"""What bends the target's logits before the draw: penalties, grammars, bias, custom processors."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import torch
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch
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


def penalties_of(orchestrator: BatchedPenalizerOrchestrator) -> Penalties:
    """A view on the tensors of SGLang's penalizers; empty where none is required."""

    def view(kind: type, penalizer: type, *names: str) -> Any:
        held = orchestrator.penalizers.get(penalizer)
        if held is None or not held.is_prepared():
            return None
        return kind(*(getattr(held, name) for name in names))

    def penalty(penalizer: type, name: str) -> Penalty | None:
        return view(Penalty, penalizer, f"cumulated_{name}_penalties", f"{name}_penalties")

    length = ("len_output_tokens", "min_new_tokens", "stop_token_penalties")
    return Penalties(
        frequency=penalty(BatchedFrequencyPenalizer, "frequency"),
        presence=penalty(BatchedPresencePenalizer, "presence"),
        repetition=penalty(BatchedRepetitionPenalizer, "repetition"),
        min_length=view(MinLength, BatchedMinNewTokensPenalizer, *length),
    )


def recount(penalties: Penalties, reqs: list[Req], device: str) -> None:
    """Count the output that requests bring into a prefill: those that were retracted.

    SGLang starts its penalizers from nothing at every prefill.
    """
    outputs = [list(req.output_ids) for req in reqs]
    if longest := max(map(len, outputs)):
        tokens = torch.tensor([ids + [0] * (longest - len(ids)) for ids in outputs], device=device)
        penalties.advance(tokens, torch.tensor([len(ids) for ids in outputs], device=device))


def mask_by_grammar(logits: Tensor, batch: ScheduleBatch, block: Tensor | None) -> None:
    """Ban in place what each request's grammar forbids after its output and drafts.

    logits: [B * w, V]; block: [B, w] int64 on device, None in prefill (w = 1). A draft that the
    grammar forbids ends the walk: the target cannot draw it, so nothing behind it is accepted.
    """
    width = 1 if block is None else block.shape[1]
    rows = [[0]] * len(batch.reqs) if block is None else block.tolist()
    first = next(req.grammar for req in batch.reqs if req.grammar is not None)
    mask = first.allocate_vocab_mask(
        vocab_size=batch.sampling_info.vocab_size, batch_size=len(rows) * width, device="cpu"
    )
    for i, (req, tokens) in enumerate(zip(batch.reqs, rows, strict=True)):
        if req.grammar is not None and not req.grammar.finished:
            _walk(req.grammar, tokens, mask, i * width)
    dense = logits.contiguous()  # SGLang's kernel takes the width of a row for its stride
    first.apply_vocab_mask(logits=dense, vocab_mask=first.move_vocab_mask(mask, logits.device))
    if dense is not logits:
        logits.copy_(dense)


def _walk(grammar: BaseGrammarObject, tokens: list[int], mask: Tensor, row: int) -> None:
    """Fill mask rows for as long as the drafts are legal, then take the drafts back."""
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
    """Let each request's own processor bend its row in place. logits: [B, V].

    One call a request: SGLang's own processors assert that all rows they are given want the same.
    User code that raises ends its request, not the scheduler.
    """
    for processor, mask in info.custom_logit_processor.values():
        for row in mask.nonzero().flatten().tolist():
            try:
                logits[row] = processor(logits[row : row + 1].clone(), [info.custom_params[row]])[0]
            except Exception as error:  # noqa: BLE001 - user code
                reason = f"The custom logit processor failed: {error!r}"[:500]
                reqs[row].to_finish = FINISH_ABORT(reason, HTTPStatus.BAD_REQUEST)
