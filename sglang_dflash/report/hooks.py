"""Reports of a DFLASH server: answers' `meta_info`, the log, Prometheus, `/server_info`."""

from __future__ import annotations

import copy
from typing import Any

from sglang_dflash.report.metrics import AcceptanceHistogram
from sglang_dflash.report.shown_steps import ShownSteps
from sglang_dflash.report.step_log import WATCHED
from sglang_dflash.seam.patched import temporarily


def meta_info(
    _: None, tokenizer_manager: Any, meta_info: dict[str, Any], recv_obj: Any, index: int
) -> None:
    """AFTER `TokenizerManager._calculate_spec_decoding_metrics`: accepted drafts by position.

    Entry p - 1 counts the steps that accepted the draft at block position p.
    """
    histogram = meta_info.get("spec_correct_drafts_histogram")
    if not isinstance(histogram, AcceptanceHistogram):
        return
    # JSON cannot represent `AcceptanceHistogram`.
    meta_info["spec_correct_drafts_histogram"] = counts = list(histogram)
    meta_info["spec_accept_histogram"] = counts
    verified = histogram.num_verified
    meta_info["spec_num_proposed_drafts"] = meta_info["spec_proposed_drafts"] = verified
    # It is 0 if every step verified only the anchor.
    meta_info["spec_accept_rate"] = meta_info["spec_num_correct_drafts"] / max(1, verified)
    block_size = tokenizer_manager.server_args.speculative_num_draft_tokens
    meta_info["spec_accepted_per_position"] = accepted_per_position(counts, block_size)


def accepted_per_position(histogram: list[int], block_size: int) -> list[int]:
    """Entry p - 1: the steps that accepted the draft at block position p. histogram: SGLang's."""
    return [sum(histogram[position:]) for position in range(1, block_size)]


def watched_steps(
    _: None,
    manager: Any,
    meta_info: dict[str, Any],
    state: Any,
    _top: Any,
    _ids: Any,
    _text: Any,
    recv_obj: Any,
    index: int,
) -> None:
    """AFTER `TokenizerManager.convert_logprob_style`: the last steps of a request that is watched.

    This is the one method that SGLang calls for every chunk of a stream, if it has logprobs. Steps
    stay with SGLang's state of the request.
    """
    histograms = recv_obj.spec_correct_drafts_histogram
    steps = getattr(histograms[index], "steps", None) if histograms else None
    if steps is None:
        return
    shown: ShownSteps = vars(state).setdefault("dflash_steps", ShownSteps())
    answer, total = state.output_token_logprobs_idx, recv_obj.spec_verify_ct[index]
    shown.add(steps, total, answer, manager.tokenizer)
    meta_info[WATCHED] = list(shown.by_number.values())


def verified_drafts(original: Any, reporter: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND `SchedulerMetricsReporter.report_decode_stats`: rates count the verified drafts.

    SGLang divides by the drafts of whole blocks, whose size is a server argument. The mean verify
    width of the interval takes its place. The gauge `spec_num_draft_tokens` shows it, too.
    """
    scheduler = reporter.scheduler
    is_due = reporter.forward_ct_decode % scheduler.server_args.decode_log_interval == 0
    if not is_due:
        original(reporter, *args, **kwargs)
        return
    logged = copy.copy(scheduler.server_args)
    logged.speculative_num_draft_tokens = scheduler.draft_worker.report.take_mean_width()
    with temporarily(scheduler, server_args=logged):
        original(reporter, *args, **kwargs)


def count_steps(_: None, reporter: Any) -> None:
    """AFTER `SchedulerMetricsReporter.__post_init__`: Prometheus gets the counts of the worker."""
    if reporter.current_scheduler_metrics_enabled:
        reporter.scheduler.draft_worker.report.count_steps(reporter.metrics_collector.labels)


def describe(result: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    """AFTER `Scheduler.get_init_info`: `/server_info` says what serves, and how."""
    result["sglang_dflash"] = scheduler.draft_worker.report.description()
    return result


def describe_replica(result: Any, scheduler: Any, *_: Any) -> Any:
    """AFTER `Scheduler.get_internal_state`: so does the state of each replica."""
    describe(result.internal_state, scheduler)
    return result


async def describe_first(original: Any, manager: Any) -> list[dict[str, Any]]:
    """AROUND `TokenizerControlMixin.get_internal_state`: replicas are in the order of their ranks.

    The first one's description is that of `/server_info`, in whose answer these states are.
    """
    from sglang.srt.entrypoints import http_server

    states: list[dict[str, Any]] = await original(manager)
    states.sort(key=lambda state: state["sglang_dflash"].get("dp_rank", 0))
    if http_server._global_state is not None:  # else this is SGLang's `Engine`
        shown = http_server._global_state.scheduler_info
        shown.setdefault("sglang_dflash", states[0]["sglang_dflash"])
    return states
