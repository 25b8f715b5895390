"""Commit: append the accepted tokens to their requests, and advance the lengths."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch
from sglang.srt.managers.scheduler import GenerationBatchResult
from torch import Tensor

from sglang_dflash.method.acceptance import AcceptResult, Outcome
from sglang_dflash.method.block import Block
from sglang_dflash.step.clock import StepClock
from sglang_dflash.step.policies import (
    CommittedStep,
    CommittedTokens,
    Logprobs,
    StepObserver,
    TargetStates,
)
from sglang_dflash.step.verify import VerifyResult

logger = logging.getLogger(__name__)


class Committer:
    """Ends a step on the host."""

    def __init__(
        self,
        states: TargetStates,
        logprobs: Logprobs,
        observers: list[StepObserver],
        clock: StepClock,
    ) -> None:
        self._states = states
        self._logprobs = logprobs
        self._clock = clock
        self.observers = observers

    def commit(
        self, batch: ScheduleBatch, drafted: Block, verified: VerifyResult, outcome: Outcome
    ) -> GenerationBatchResult:
        """Give the accepted tokens to their requests.

        drafted: the whole block, of which a part is verified; outcome: of the step, on the host.
        """
        with self._clock("commit", on_host=True):
            return self._commit(batch, drafted, verified, outcome)

    def _commit(
        self, batch: ScheduleBatch, drafted: Block, verified: VerifyResult, outcome: Outcome
    ) -> GenerationBatchResult:
        output = verified.output
        widths = outcome.widths.tolist()
        committed = self._commit_requests(batch, outcome)
        tokens = [each.tokens for each in committed]
        num_committed = [len(ids) for ids in tokens]
        lens = [req.kv_committed_len for req in batch.reqs]
        self._states.commit(batch.req_pool_indices, num_committed, lens)
        step = CommittedStep(
            batch.reqs, lambda: drafted.token_ids[:, 1:].tolist(), widths, committed
        )
        for observer in self.observers:
            observer.observe(step)
        if batch.return_logprob:
            self._logprobs.after_verify(batch, output.next_token_logits.split(widths), tokens)
        if batch.return_hidden_states:
            _append_hidden_states(batch, output.hidden_states.split(widths), tokens)
        _advance(batch, verified.accepted, lens)
        output.hidden_states = None
        result = verified.result
        result.next_token_ids = verified.accepted.bonus
        result.num_correct_drafts = sum(step.accepted)
        # SGLang expects the number of committed tokens of each request, minus one.
        result.num_correct_drafts_per_req_cpu = [count - 1 for count in num_committed]
        return result

    def _commit_requests(self, batch: ScheduleBatch, outcome: Outcome) -> list[CommittedTokens]:
        """outcome: on the host."""
        committed = []
        think_end = batch.model_config.think_end_id
        sampled = outcome.sampled.tolist()
        accepted = outcome.num_accepted.tolist()
        for req, ids, num_accepted in zip(batch.reqs, sampled, accepted, strict=True):
            place = len(req.output_ids)
            num_committed = append_until_finished(req, ids[: num_accepted + 1])
            tokens = ids[:num_committed]
            num_accepted = min(num_accepted, num_committed)
            _count(req, num_committed, num_accepted)
            if think_end is not None and req.require_reasoning:
                req.update_reasoning_tokens(tokens, think_end)
            committed.append(CommittedTokens(tokens, num_accepted, place))
        return committed


def append_until_finished(req: Req, tokens: list[int]) -> int:
    """Append a request's committed tokens, as one-token decoding would.

    The token that finishes the request is the last one. Returns the number of committed tokens,
    at least 1.
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


def _count(req: Req, num_committed: int, num_accepted: int) -> None:
    """Count a step of a request in SGLang's own fields."""
    req.kv_committed_len += num_committed
    req.decode_batch_idx += 1
    req.spec_verify_ct += 1
    req.spec_num_correct_drafts += num_accepted


def _advance(batch: ScheduleBatch, accepted: AcceptResult, committed: list[int]) -> None:
    """Advance all lengths in new tensors. committed: the length of each request on the host.

    Device and host differ only for requests that finished inside their accepted tokens. Those
    leave the batch before the next step.
    """
    batch.seq_lens = accepted.lens
    batch.orig_seq_lens = accepted.lens.int()
    batch.seq_lens_cpu = torch.tensor(committed)
    batch.seq_lens_sum = sum(committed)


def _append_hidden_states(
    batch: ScheduleBatch, states: Sequence[Tensor], tokens: list[list[int]]
) -> None:
    """Append the last layer's state of each committed position. states: [w, .. + H] per request."""
    hidden_size = batch.model_config.hidden_size
    for req, request_states, ids in zip(batch.reqs, states, tokens, strict=True):
        if req.return_hidden_states:
            last_layer = request_states[: len(ids), -hidden_size:]
            req.hidden_states.extend(last_layer.tolist())
