"""Commit: requests and lengths take over what was accepted."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch
from sglang.srt.managers.scheduler import GenerationBatchResult
from torch import Tensor

from sglang_dflash.core.accept import Accepted
from sglang_dflash.runtime.constraints import penalties_of
from sglang_dflash.runtime.logprobs import append_committed
from sglang_dflash.runtime.metrics import StepCounters
from sglang_dflash.runtime.verifier import Verified

logger = logging.getLogger(__name__)


def append_until_finished(req: Req, tokens: list[int]) -> int:
    """Give a request its committed tokens, with what one-token decoding would make of each.

    Stops behind the token that finishes it; returns how many were taken, at least 1.
    """
    before = len(req.output_ids)
    for part in _parts(req, tokens):
        req.output_ids.extend(part)
        req.update_finish_state(len(part))
        if req.grammar is not None:
            try:
                req.grammar.accept_token(part[0])
            except ValueError as error:
                logger.error("Grammar of request %s: %s", req.rid, error)
                req.to_finish = FINISH_ABORT(f"The grammar refused token {part[0]}.")
                req.update_finish_state()
        if req.finished():
            del req.output_ids[req.finished_len or len(req.output_ids) :]
            break
    return len(req.output_ids) - before


def _parts(req: Req, tokens: list[int]) -> list[list[int]]:
    """What SGLang may be asked about at once.

    It finds the first end token among several, but looks for strings behind the last alone, and
    asks for the length before all else.
    """
    sampling = req.sampling_params
    if req.grammar or req.to_finish or sampling.stop_strs or sampling.stop_regex_strs:
        return [[token] for token in tokens]
    last = max(0, sampling.max_new_tokens - len(req.output_ids) - 1)
    return [part for part in (tokens[:last], tokens[last : last + 1]) if part]


class Committer:
    def __init__(self, block_size: int, cuts: bool, counters: StepCounters | None) -> None:
        """cuts: blocks are verified in part, so that the drafts verified must be counted."""
        self._block_size, self._cuts, self._counters = block_size, cuts, counters

    def commit(
        self, batch: ScheduleBatch, verified: Verified, packed: list[list[int]]
    ) -> GenerationBatchResult:
        """packed: `verified.accepted.packed`, on the host."""
        block, output = verified.block, verified.output
        if batch.sampling_info.penalizer_orchestrator.is_required:
            penalties = penalties_of(batch.sampling_info.penalizer_orchestrator)
            penalties.advance(block.token_ids, verified.accepted.num_accepted + 1)
        tokens, accepted = self._commit_requests(batch, packed, block.lens)
        if self._counters is not None:
            self._counters.observe(accepted)
        if batch.return_logprob:
            append_committed(batch, output.next_token_logits.split(block.lens), tokens)
        if batch.return_hidden_states:
            _append_hidden_states(batch, output.hidden_states.split(block.lens), tokens)
        self._advance(batch, verified.accepted)
        output.hidden_states = None
        result = verified.result
        result.next_token_ids = verified.accepted.bonus
        result.num_correct_drafts = sum(accepted)
        result.num_correct_drafts_per_req_cpu = accepted
        return result

    def _commit_requests(
        self, batch: ScheduleBatch, packed: list[list[int]], widths: list[int]
    ) -> tuple[list[list[int]], list[int]]:
        """Hand over tokens and count, in SGLang's own counters: steps, accepted drafts, histogram.

        widths: of each request what was verified. Its drafts are counted behind the histogram's N
        entries, where `hooks.meta_info` finds them.
        Returns for each request the tokens that it took, and how many accepted drafts these hold.
        """
        think_end = batch.model_config.think_end_id
        taken, accepted = [], []
        for req, row, width in zip(batch.reqs, packed, widths, strict=True):
            tokens = row[: append_until_finished(req, row[: row[-1] + 1])]
            count = min(len(tokens), row[-1])
            req.kv_committed_len += len(tokens)
            req.decode_batch_idx += 1
            req.spec_verify_ct += 1
            req.spec_num_correct_drafts += count
            req.update_spec_correct_drafts_histogram(count)
            if self._cuts:
                histogram = req.spec_correct_drafts_histogram
                histogram.extend([0] * (self._block_size + 1 - len(histogram)))
                histogram[self._block_size] += width - 1
            if think_end is not None and req.require_reasoning:
                req.update_reasoning_tokens(tokens, think_end)
            accepted.append(count)
            taken.append(tokens)
        return taken, accepted

    def _advance(self, batch: ScheduleBatch, accepted: Accepted) -> None:
        """Advance all lengths in new tensors.

        Device and host differ only for requests that finished inside their accepted tokens, and
        those rows leave the batch before the next step.
        """
        batch.seq_lens, batch.orig_seq_lens = accepted.lens, accepted.lens.int()
        committed = [req.kv_committed_len for req in batch.reqs]
        batch.seq_lens_cpu, batch.seq_lens_sum = torch.tensor(committed), sum(committed)


def append_prompt_states(batch: ScheduleBatch, states: Tensor) -> None:
    """The last layer's states of each request's last chunk of prompt. states: [tokens, .. + H].

    SGLang itself takes a request's rows where they would be if all requests wanted theirs and no
    prefix were cached.
    """
    last_layer = states[:, -batch.model_config.hidden_size :]
    for req, rows in zip(batch.reqs, last_layer.split(batch.extend_lens), strict=True):
        if req.return_hidden_states and req.inflight_middle_chunks <= 0:
            req.hidden_states.append(rows.tolist())


def _append_hidden_states(
    batch: ScheduleBatch, states: Sequence[Tensor], tokens: list[list[int]]
) -> None:
    """The last layer's state of each committed token's row. states: [w, .. + H] a request."""
    for rows, req, taken in zip(states, batch.reqs, tokens, strict=True):
        if req.return_hidden_states:
            last = rows[: len(taken), -batch.model_config.hidden_size :]
            req.hidden_states.extend(last.tolist())
