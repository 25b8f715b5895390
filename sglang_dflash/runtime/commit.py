"""Commit: append the accepted tokens to their requests, and advance the lengths."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch
from sglang.srt.managers.scheduler import GenerationBatchResult
from torch import Tensor

from sglang_dflash.core.acceptance import Accepted, Outcome
from sglang_dflash.runtime.block import DFlashBlock
from sglang_dflash.runtime.logit_rules import penalties_of
from sglang_dflash.runtime.logprobs import append_committed
from sglang_dflash.runtime.metrics import AcceptanceHistogram, StepObserver
from sglang_dflash.runtime.recurrent_states import TargetStates
from sglang_dflash.runtime.step_log import Step, is_watched, new_log
from sglang_dflash.runtime.verify import Verified

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Committed:
    """The tokens that a request took in a step, at least one."""

    tokens: list[int]
    num_accepted: int  # drafts among them


class Committer:
    """Ends a step on the host."""

    def __init__(self, states: TargetStates, observers: list[StepObserver]) -> None:
        self._states, self.observers = states, observers

    def commit(
        self, batch: ScheduleBatch, drafted: DFlashBlock, verified: Verified, outcome: Outcome
    ) -> GenerationBatchResult:
        """Give the accepted tokens to their requests.

        drafted: the whole block, of which a part is verified; outcome: of the step, on the host.
        """
        block, output = verified.block, verified.output
        if batch.sampling_info.penalizer_orchestrator.is_required:
            num_committed = verified.accepted.outcome.num_accepted + 1
            penalties = penalties_of(batch.sampling_info.penalizer_orchestrator)
            penalties.advance(block.token_ids, num_committed)
        widths = block.lens
        committed = self._commit_requests(batch, outcome, widths)
        tokens = [each.tokens for each in committed]
        accepted = [each.num_accepted for each in committed]
        counts = [len(taken) for taken in tokens]
        lens = [req.kv_committed_len for req in batch.reqs]
        self._states.commit(batch.req_pool_indices, counts, lens)
        for observer in self.observers:
            observer.observe(widths, accepted)
        if any(is_watched(req) for req in batch.reqs):
            _log_steps(batch.reqs, drafted, widths, committed)
        if batch.return_logprob:
            append_committed(batch, output.next_token_logits.split(widths), tokens)
        if batch.return_hidden_states:
            _append_hidden_states(batch, output.hidden_states.split(widths), tokens)
        _advance(batch, verified.accepted, lens)
        output.hidden_states = None
        result = verified.result
        result.next_token_ids = verified.accepted.bonus
        result.num_correct_drafts = sum(accepted)
        # SGLang expects the number of tokens that a request took, minus one.
        result.num_correct_drafts_per_req_cpu = [count - 1 for count in counts]
        return result

    def _commit_requests(
        self, batch: ScheduleBatch, outcome: Outcome, widths: list[int]
    ) -> list[Committed]:
        """outcome: on the host; widths: the verify width of each request."""
        committed = []
        think_end = batch.model_config.think_end_id
        draws, numbers = outcome.drawn.tolist(), outcome.num_accepted.tolist()
        for req, drawn, num_accepted, width in zip(batch.reqs, draws, numbers, widths, strict=True):
            taken = append_until_finished(req, drawn[: num_accepted + 1])
            tokens, accepted = drawn[:taken], min(taken, num_accepted)
            _count(req, taken, accepted, width - 1)
            if think_end is not None and req.require_reasoning:
                req.update_reasoning_tokens(tokens, think_end)
            committed.append(Committed(tokens, accepted))
        return committed


def append_until_finished(req: Req, tokens: list[int]) -> int:
    """Append a request's committed tokens, as one-token decoding would.

    The token that finishes the request is the last one. Returns the number of tokens taken, at
    least 1.
    """
    before = len(req.output_ids)
    for part in _parts(req, tokens):
        req.output_ids.extend(part)
        req.update_finish_state(len(part))
        if req.grammar is not None:
            _accept_by_grammar(req, part[0])
        if req.finished():
            if req.finished_len is not None:
                del req.output_ids[req.finished_len :]
            break
    return len(req.output_ids) - before


def _parts(req: Req, tokens: list[int]) -> list[list[int]]:
    """Split tokens into runs that SGLang can check in one call.

    Among several tokens, SGLang finds the first end token. But it looks for stop strings only at
    the last token, and it checks the length before everything else.
    """
    sampling = req.sampling_params
    if req.grammar or req.to_finish or sampling.stop_strs or sampling.stop_regex_strs:
        return [[token] for token in tokens]
    last = max(0, sampling.max_new_tokens - len(req.output_ids) - 1)
    return [part for part in (tokens[:last], tokens[last : last + 1]) if part]


def _accept_by_grammar(req: Req, token: int) -> None:
    try:
        req.grammar.accept_token(token)
    except ValueError as error:
        logger.error("Grammar of request %s: %s", req.rid, error)
        req.to_finish = FINISH_ABORT(f"The grammar refused token {token}.")
        req.update_finish_state()
    req.grammar.finished = req.finished()  # as SGLang; llguidance ends at any end token


def _count(req: Req, taken: int, num_accepted: int, num_verified: int) -> None:
    """Count a step of a request: in SGLang's own fields, and the drafts that were verified."""
    req.kv_committed_len += taken
    req.decode_batch_idx += 1
    req.spec_verify_ct += 1
    req.spec_num_correct_drafts += num_accepted
    if not isinstance(req.spec_correct_drafts_histogram, AcceptanceHistogram):
        req.spec_correct_drafts_histogram = AcceptanceHistogram()
    req.update_spec_correct_drafts_histogram(num_accepted)
    req.spec_correct_drafts_histogram.num_verified += num_verified


def _log_steps(
    reqs: list[Req], drafted: DFlashBlock, widths: list[int], committed: list[Committed]
) -> None:
    """Keep this step of the requests that are watched.

    The host waits for a copy of the drafts, and so for all work that is queued.
    """
    now, drafts = time.monotonic(), drafted.token_ids[:, 1:].tolist()
    for req, ids, width, taken in zip(reqs, drafts, widths, committed, strict=True):
        if not is_watched(req):
            continue
        histogram = req.spec_correct_drafts_histogram
        if histogram.steps is None:
            histogram.steps = new_log()
        count = len(taken.tokens)
        place = len(req.output_ids) - count
        histogram.steps.append(
            Step(ids, width - 1, taken.num_accepted, count, place, len(reqs), now)
        )


def _advance(batch: ScheduleBatch, accepted: Accepted, committed: list[int]) -> None:
    """Advance all lengths in new tensors. committed: the length of each request on the host.

    Device and host differ only for requests that finished inside their accepted tokens. Those
    leave the batch before the next step.
    """
    batch.seq_lens, batch.orig_seq_lens = accepted.lens, accepted.lens.int()
    batch.seq_lens_cpu, batch.seq_lens_sum = torch.tensor(committed), sum(committed)


def _append_hidden_states(
    batch: ScheduleBatch, states: Sequence[Tensor], tokens: list[list[int]]
) -> None:
    """Append the last layer's state of each committed position. states: [w, .. + H] per request."""
    hidden_size = batch.model_config.hidden_size
    for req, request_states, taken in zip(batch.reqs, states, tokens, strict=True):
        if req.return_hidden_states:
            last_layer = request_states[: len(taken), -hidden_size:]
            req.hidden_states.extend(last_layer.tolist())
