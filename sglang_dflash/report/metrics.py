"""Acceptance, as a server counts it. Everything divides by the drafts that were verified.

A step of a request drafts N - 1 tokens, verifies w - 1 of them and accepts some of these.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sglang_dflash.report.step_log import Step, is_watched, new_log
from sglang_dflash.step.noise import is_sampled
from sglang_dflash.step.policies import CommittedStep

logger = logging.getLogger(__name__)

WATCHED_STEPS = 1000  # of requests, over which the accept length is judged
LOW_ACCEPT_LENGTH = 1.3  # tokens a step; no draft of a matching pair is known to stay below


class AcceptanceHistogram(list[int]):
    """SGLang's histogram of a request, and the drafts that were verified for it.

    Entry n counts the steps that accepted n drafts. It travels from the scheduler to the tokenizer
    process, where `report.hooks` reads it. SGLang itself assumes that blocks are verified whole.

    `Req.customized_info` cannot carry these: its list has no entries of requests without values
    (`output_streamer.py`), so beside such requests they reach the wrong one.
    """

    num_verified = 0
    steps: deque[Step] | None = None  # the last ones, of a request that is watched


class RequestCounts:
    """Counts the accepted and the verified drafts of each request, for its `meta_info`."""

    def observe(self, step: CommittedStep) -> None:
        for req, width, accepted in zip(step.reqs, step.widths, step.accepted, strict=True):
            if not isinstance(req.spec_correct_drafts_histogram, AcceptanceHistogram):
                req.spec_correct_drafts_histogram = AcceptanceHistogram()
            req.update_spec_correct_drafts_histogram(accepted)
            req.spec_correct_drafts_histogram.num_verified += width - 1


class StepLog:
    """Keeps the steps of requests that are watched.

    The host waits for a copy of their drafts, and so for all work that is queued.
    """

    def __init__(self, keep: Callable[[Any, Step], None]) -> None:
        """keep: where a step is kept, by SGLang's `Req`."""
        self._keep = keep

    def observe(self, step: CommittedStep) -> None:
        if not any(is_watched(req) for req in step.reqs):
            return
        now, drafts = time.monotonic(), step.drafts()
        for req, ids, width, each in zip(
            step.reqs, drafts, step.widths, step.committed, strict=True
        ):
            if is_watched(req):
                count, place = len(each.tokens), each.place
                self._keep(
                    req,
                    Step(ids, width - 1, each.num_accepted, count, place, len(step.reqs), now),
                )


def keep_in_histogram(req: Any, step: Step) -> None:
    """Keep the last steps of a request with its counts, which `RequestCounts` makes before."""
    histogram = req.spec_correct_drafts_histogram
    if histogram.steps is None:
        histogram.steps = new_log()
    histogram.steps.append(step)


class MeanWidth:
    """The mean verify width since it was asked for last."""

    def __init__(self) -> None:
        self._steps = self._positions = 0

    def observe(self, step: CommittedStep) -> None:
        self._steps += len(step.widths)
        self._positions += sum(step.widths)

    def take(self) -> float:
        """Positions of a step, and begin anew. 1 if there was no step."""
        mean = self._positions / self._steps if self._steps else 1.0
        self._steps = self._positions = 0
        return mean


class LowAcceptance:
    """Warns if hardly any draft is accepted, once until acceptance is better.

    Sampled requests are judged apart: a hot target is hard to draft for, however good the draft is.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._greedy, self._sampled = _Recent(), _Recent()

    def observe(self, step: CommittedStep) -> None:
        for req, accepted in zip(step.reqs, step.accepted, strict=True):
            recent = self._sampled if is_sampled(req) else self._greedy
            if recent.becomes_low(accepted, req.sampling_params.temperature):
                self._warn(recent, is_sampled(req))

    def _warn(self, recent: _Recent, sampled: bool) -> None:
        of_requests, advice = "", ""
        if sampled:
            of_requests = (
                f" of sampled requests, at a mean temperature of {recent.temperature:.1f},"
            )
            known = self._greedy.length
            if known is not None and known >= LOW_ACCEPT_LENGTH:
                advice = f"Greedy requests commit {known:.2f}, so the draft fits the target. "
            advice += "The hotter the target, the less a draft can know. If it is not hot: "
        logger.warning(
            "DFLASH: acceptance is low. The last %d steps%s committed %.2f tokens each, and a "
            "block of this draft holds %d. Answers are right, but slow. %sCheck with "
            "`sglang-dflash inspect` that the draft belongs to this target. Check that requests "
            "use the chat template and the thinking mode that the draft was trained with. See "
            "docs/operating.md.",
            WATCHED_STEPS,
            of_requests,
            recent.length,
            self._block_size,
            advice,
        )


class _Recent:
    """The last steps of requests of one kind."""

    def __init__(self) -> None:
        self.length: float | None = None  # tokens a step, once enough steps are known
        self.temperature = 0.0  # their mean
        self._is_low = False
        self._steps = self._accepted = 0
        self._temperatures = 0.0

    def becomes_low(self, accepted: int, temperature: float) -> bool:
        """Count a step of one request. Whether its kind is found to be low, and was not before."""
        self._steps += 1
        self._accepted += accepted
        self._temperatures += temperature
        if self._steps < WATCHED_STEPS:
            return False
        self.length = 1 + self._accepted / self._steps
        self.temperature = self._temperatures / self._steps
        self._steps = self._accepted = 0
        self._temperatures = 0.0
        was_low, self._is_low = self._is_low, self.length < LOW_ACCEPT_LENGTH
        return self._is_low and not was_low


class StepMetrics:
    """Prometheus: counters by block position, histograms of steps and of their parts."""

    def __init__(self, block_size: int, labels: dict[str, Any], parts: Sequence[str]) -> None:
        """labels: SGLang's own, with their values; parts: those of a step that are timed."""
        from prometheus_client import Counter, Histogram  # SGLang first sets their directory

        names, values = list(labels), list(labels.values())

        def by_position(what: str) -> list[Counter]:
            name = f"sglang:spec_{what}_tokens_per_position"
            text = f"Draft tokens that were {what}, by block position."
            counter = Counter(name, text, [*names, "position"])
            return [counter.labels(*values, str(p)) for p in range(1, block_size)]

        def counted(name: str, text: str) -> Counter:
            return Counter(f"sglang:{name}", text, names).labels(*values)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"sglang:{name}", text, names, buckets=buckets).labels(*values)

        self._steps = counted("spec_verify_steps", "Verify steps, counted per request.")
        self._cut = counted("spec_cut_tokens", "Draft tokens that were not verified.")
        self._drafted = by_position("drafted")
        self._verified = by_position("verified")
        self._accepted = by_position("accepted")
        sizes = range(1, block_size + 1)
        self._lengths = histogram(
            "spec_accept_length_tokens", "Tokens that a step commits, per request.", sizes
        )
        self._widths = histogram(
            "spec_verify_width_tokens", "Positions that a step verifies, per request.", sizes
        )
        times = [0.0005 * 2**i for i in range(13)]  # 0.5 ms to 2 s
        self.seconds = {
            part: histogram(f"spec_{part}_seconds", f"Time to {part} the blocks of a batch.", times)
            for part in parts
        }

    def observe(self, step: CommittedStep) -> None:
        widths, accepted, drafts = step.widths, step.accepted, len(self._drafted)
        self._steps.inc(len(widths))
        self._cut.inc(sum(drafts + 1 - width for width in widths))
        verified = _reaching([width - 1 for width in widths], drafts)
        reached = _reaching(accepted, drafts)
        for i in range(drafts):
            self._drafted[i].inc(len(widths))
            self._verified[i].inc(verified[i])
            self._accepted[i].inc(reached[i])
        for width, number in zip(widths, accepted, strict=True):
            self._widths.observe(width)
            self._lengths.observe(number + 1)


def _reaching(drafts: Sequence[int], most: int) -> list[int]:
    """The number of requests with at least 1, 2, .. `most` drafts. drafts: of each request."""
    requests = np.bincount(drafts, minlength=most + 1)  # with exactly 0, 1, .. `most`
    at_least: list[int] = requests[::-1].cumsum()[::-1].tolist()
    return at_least[1:]
