"""The worker's draw has the target's distribution, for every filter and every mix."""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.engine.v0_5_13.build import _draw
from sglang_dflash.kernels import Kernels
from sglang_dflash.logits.rules import RequestedRules
from sglang_dflash.method.acceptance import accept
from sglang_dflash.method.block import Block
from sglang_dflash.step.sample import SamplingInput, TargetSampler
from test.inprocess import InProcess
from test.worker.conftest import prompt

DRAWS = 20_000
VOCAB = 12

MIXES: dict[str, list[dict[str, Any]]] = {
    "plain": [{"temperature": 1.0}],
    "temperature": [{"temperature": 0.7}],
    "top_k": [{"temperature": 1.0, "top_k": 4}],
    "top_p": [{"temperature": 1.3, "top_p": 0.8}],
    "min_p": [{"temperature": 1.0, "min_p": 0.15}],
    "all": [{"temperature": 0.9, "top_k": 8, "top_p": 0.9, "min_p": 0.05}],
    "plain and greedy": [{"temperature": 1.0}, {"temperature": 0.0}],
    "every path": [
        {"temperature": 1.0},
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 0.8, "top_p": 0.7},
        {"temperature": 1.0, "min_p": 0.2},
    ],
}


def distribution(
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = -1,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> torch.Tensor:
    """The target's distribution after SGLang's filters (top-k, top-p, min-p over sorted probs)."""
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).double()
    probs, order = (logits.double() / temperature).softmax(-1).sort(descending=True)
    keep = torch.ones_like(probs, dtype=torch.bool)
    if top_k > 0:
        keep &= torch.arange(len(probs)) < top_k
    filtered = probs * keep
    keep &= filtered.cumsum(0) - filtered <= top_p
    keep &= probs >= probs[0] * min_p
    filtered = probs * keep
    out = torch.zeros_like(probs)
    out[order] = filtered / filtered.sum()
    return out


@pytest.fixture(scope="module")
def engine(target: str, draft: str) -> Iterator[InProcess]:
    with InProcess(target, draft) as engine:
        yield engine


def draw_many(
    engine: InProcess, mix: list[dict[str, Any]], logits: torch.Tensor, width: int, seed: int
) -> torch.Tensor:
    """[draws, len(mix), width] tokens drawn by the worker from the same logits at every row."""
    reqs = []
    for options in mix:
        params = SamplingParams(max_new_tokens=8, **options)
        params.normalize(None)
        reqs.append(types.SimpleNamespace(sampling_params=params, custom_logit_processor=None))
    batch = ScheduleBatch(reqs=reqs, device="cpu")
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, VOCAB)
    draw = TargetSampler(partial(_draw, Sampler()), RequestedRules(), Kernels.on("cpu"))
    torch.manual_seed(seed)
    zeros = torch.zeros(len(mix), width, dtype=torch.long)
    block = Block(zeros, zeros, zeros)
    rows = logits.repeat(len(mix) * width, 1)
    asked = SamplingInput.of(batch, block)
    drawn = [draw(rows.clone(), asked, block.positions) for _ in range(DRAWS // width)]
    tokens: torch.Tensor = torch.stack(drawn).unflatten(1, zeros.shape)
    return tokens


def p_value(drawn: torch.Tensor, expected: torch.Tensor) -> float:
    """Chi-square of drawn tokens; a token of probability 0 that was drawn gives 0."""
    counts = torch.bincount(drawn.flatten(), minlength=len(expected)).double()
    possible = expected > 0
    if counts[~possible].any():
        return 0.0
    if possible.sum() == 1:
        return 1.0
    return float(chisquare(counts[possible], expected[possible] * counts.sum()).pvalue)


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_distribution(engine: InProcess, mix: str) -> None:
    """p > 0.001 for every request of the mix, 20,000 draws, the rows of a block alike."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(4)) * 1.5
    drawn = draw_many(engine, MIXES[mix], logits, width=4, seed=2)
    for row, options in enumerate(MIXES[mix]):
        assert p_value(drawn[:, row], distribution(logits, **options)) > 0.001


def test_a_wrong_rule_fails(engine: InProcess) -> None:
    """The control: committing the draft with the probability of *another* token is noticed."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(4)) * 1.5
    expected = distribution(logits)
    drawn = draw_many(engine, MIXES["plain"], logits, width=4, seed=2)[:, 0, 0]
    assert p_value(drawn, expected) > 0.001
    draft = int(expected.argsort(descending=True)[1])
    lossy = torch.where(torch.rand(len(drawn)) < 0.1, torch.tensor(draft), drawn)
    assert p_value(lossy, expected) < 0.001


def test_accepted_and_bonus_tokens_together_have_the_distribution(engine: InProcess) -> None:
    """The first committed token of a block, accepted or not, is the target's own draw."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * 1.5
    expected = distribution(logits)
    drawn = draw_many(engine, MIXES["plain"], logits, width=2, seed=3)[:, 0]
    draft = int(expected.argmax())
    block = torch.tensor([[0, draft]]).expand(len(drawn), -1)
    num_accepted, bonus = accept(block, drawn)
    first = torch.where(num_accepted > 0, block[:, 1], bonus)
    probability = float(expected[draft])
    sigma = (probability * (1 - probability) / len(drawn)) ** 0.5
    assert num_accepted.double().mean() == pytest.approx(probability, abs=4 * sigma)
    assert p_value(first, expected) > 0.001


def test_requests_of_a_batch_draw_independently(engine: InProcess) -> None:
    """Two equal requests do not draw the same sequence."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(6))
    drawn = draw_many(engine, [{"temperature": 1.0}] * 2, logits, width=4, seed=1)
    assert (drawn[:, 0] != drawn[:, 1]).any()


def test_sampled_requests_are_drawn_not_argmax(engine: InProcess) -> None:
    """A sampled request differs from the greedy one, and between two runs."""
    outputs = {
        tuple(engine.generate(prompt(1, 9), temperature=2.0, max_new_tokens=30, ignore_eos=True))
        for _ in range(3)
    }
    assert len(outputs) == 3
