"""What a server reports about acceptance: one definition in the log, the gauges and answers."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.report.metrics import (
    LOW_ACCEPT_LENGTH,
    WATCHED_STEPS,
    LowAcceptance,
    MeanWidth,
)
from sglang_dflash.settings.options import VERIFY_WIDTH
from sglang_dflash.step.policies import CommittedStep, CommittedTokens
from test.checkpoints import prompt
from test.inprocess import InProcess
from test.worker.conftest import force

RATE = re.compile(r"accept len: ([0-9.]+), accept rate: ([0-9.]+)")


def step(widths: list[int], accepted: list[int], temperature: float = 0.0) -> CommittedStep:
    """A step of which only these are known."""
    committed = [CommittedTokens([], number, 0) for number in accepted]
    params = SamplingParams(temperature=temperature)
    params.normalize(None)
    reqs: list[Any] = [SimpleNamespace(sampling_params=params) for _ in accepted]
    return CommittedStep(reqs, list, widths, committed)


def test_the_mean_width_begins_anew() -> None:
    widths = MeanWidth()
    assert widths.take() == 1.0
    widths.observe(step([8, 2, 5], [7, 0, 1]))
    widths.observe(step([1], [0]))
    assert widths.take() == 4.0
    widths.observe(step([3], [2]))
    assert widths.take() == 3.0


def observe(watch: LowAcceptance, length: float, temperature: float = 0.0) -> None:
    """As many steps as are judged together."""
    accepted = round((length - 1) * WATCHED_STEPS)
    each = [1] * accepted + [0] * (WATCHED_STEPS - accepted)
    watch.observe(step([16] * WATCHED_STEPS, each, temperature))


def test_low_acceptance_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = LowAcceptance(16)
    for length in (LOW_ACCEPT_LENGTH, 1.05, 1.04, 1.9, 1.02):
        observe(watch, length)
    warned = [record.message for record in caplog.records]
    assert len(warned) == 2
    assert "1.05" in warned[0]
    assert "1.02" in warned[1]
    assert "sglang-dflash inspect" in warned[0]


def test_a_hot_target_is_told_from_a_bad_draft(caplog: pytest.LogCaptureFixture) -> None:
    watch = LowAcceptance(16)
    observe(watch, 1.1, temperature=1.4)
    observe(watch, 1.9)
    observe(watch, 1.6, temperature=0.7)
    observe(watch, 1.2, temperature=1.2)
    observe(watch, 1.1)
    unsure, sure, greedy = [record.message for record in caplog.records]
    assert "sampled requests, at a mean temperature of 1.4, committed 1.10 tokens" in unsure
    assert "Greedy requests commit" not in unsure
    assert "temperature of 1.2" in sure
    assert "Greedy requests commit 1.90, so the draft fits the target." in sure
    assert "sampled" not in greedy


@pytest.mark.parametrize("width", ["full", "4"])
def test_the_log_counts_verified_drafts(
    target: str,
    draft: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    width: str,
) -> None:
    """SGLang divides by the drafts of a whole block, also if the target verified less."""
    monkeypatch.setenv(VERIFY_WIDTH, width)
    flags: dict[str, Any] = {"decode_log_interval": 1, "log_level": "info"}
    with InProcess(target, draft, **flags) as engine:
        request: dict[str, Any] = {"max_new_tokens": 21, "ignore_eos": True}
        ids = engine.generate(prompt(60, 20), **request)
        capfd.readouterr()
        req = engine.add(prompt(60, 20), **request)
        force(engine, lambda _: 1).truth[req.rid] = ids
        engine.run(req)
    rates = RATE.findall(capfd.readouterr().err)
    verified = 7 if width == "full" else 3
    assert len(rates) == 10
    assert set(rates) == {("2.00", f"{1 / verified:.2f}")}
