"""Reports of steps on SGLang 0.5.23, whose scheduler commits them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sglang.srt.runtime_context import get_spec

from sglang_dflash.report.hooks import accepted_per_position
from sglang_dflash.report.shown_steps import ShownSteps
from sglang_dflash.report.step_log import WATCHED, Step, is_watched, new_log
from sglang_dflash.step.policies import CommittedStep, CommittedTokens

STEPS = "dflash_steps"  # a key of `Req.customized_info`, which has a value for each token


def keep_drafts(result: Any, reqs: list[Any], candidates: Any) -> None:
    """Keep the drafts of watched requests with a step's result. candidates: [B, N], with anchors.

    The host waits for their copy.
    """
    if any(map(is_watched, reqs)):
        result.dflash_drafts = candidates[:, 1:].tolist()


def observe(original: Any, processor: Any, result: Any, batch: Any) -> list[list[int]]:
    """AROUND `_resolve_spec_v2_tokens`: show the outcome of a step to the worker's observers.

    A step that was launched before its request ended does not count.
    """
    counted = [not (req.is_retracted or req.finished()) for req in batch.reqs]
    tokens: list[list[int]] = original(processor, result, batch)
    rows = [row for row, counts in enumerate(counted) if counts]
    reqs = [batch.reqs[row] for row in rows]
    accepted = result.num_correct_drafts_per_req_cpu
    step = CommittedStep(
        reqs,
        lambda: [result.dflash_drafts[row] for row in rows],
        [result.next_token_ids.numel() // len(batch.reqs)] * len(rows),
        [
            CommittedTokens(
                tokens[row], min(accepted[row], len(tokens[row])), len(batch.reqs[row].output_ids)
            )
            for row in rows
        ],
    )
    for observer in processor.model_worker.report.observers:
        observer.observe(step)
    return tokens


def keep_by_token(req: Any, step: Step) -> None:
    """Keep a step at the first of its tokens. SGLang sends the values of new tokens only."""
    req.customized_info = req.customized_info or {}
    values = req.customized_info.setdefault(STEPS, [])
    values += [None] * (step.place - len(values))
    values.append((req.spec_verify_ct - 1, step))


def by_position(_: None, manager: Any, meta_info: dict[str, Any], *__: Any) -> None:
    """AFTER `TokenizerManager._calculate_spec_decoding_metrics`: accepted drafts by position."""
    counts = meta_info.get("spec_correct_drafts_histogram")
    if counts is not None:
        block_size = get_spec().speculative_num_draft_tokens
        meta_info["spec_accepted_per_position"] = accepted_per_position(counts, block_size)


def watched_steps(
    original: Any,
    manager: Any,
    meta_info: dict[str, Any],
    state: Any,
    customized_info: dict[str, Any],
    index: int,
    finish_reason: Any,
) -> None:
    """AROUND `TokenizerManager.update_request_meta_info`: the last steps of a watched request."""
    others = {key: values for key, values in customized_info.items() if key != STEPS}
    original(manager, meta_info, state, others, index, finish_reason)
    if STEPS not in customized_info:
        return
    new = [value for value in customized_info[STEPS][index] if value is not None]
    log, shown = vars(state).setdefault("dflash_steps", (new_log(), ShownSteps()))
    answer = state.output_token_logprobs_idx
    for number, step in new:  # the last one may end behind the answer's end
        count = min(step.num_committed, len(answer) - step.place)
        accepted = min(step.num_accepted, count)
        log.append(replace(step, num_committed=count, num_accepted=accepted))
        shown.add(log, number + 1, answer, manager.tokenizer)
    if log:  # others in the batch have empty ones
        meta_info[WATCHED] = list(shown.by_number.values())
