"""The worker's draw has the target's distribution, for every filter and every mix."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from scipy.stats import chi2_contingency, chisquare
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.engine.hooks import seed_answers_apart
from sglang_dflash.kernels import Kernels
from sglang_dflash.logits.rules import RequestedRules
from sglang_dflash.method.acceptance import accept
from sglang_dflash.method.block import Block
from sglang_dflash.step.noise import Noise
from sglang_dflash.step.sample import SamplingInput, TargetSampler
from test.checkpoints import prompt
from test.inprocess import InProcess

REQUESTS, POSITIONS = 10, 20_000  # 200,000 draws
VOCAB = 12

MIXES: dict[str, list[dict[str, Any]]] = {
    "plain": [{"temperature": 1.0}],
    "cold": [{"temperature": 0.3}],
    "temperature": [{"temperature": 0.7}],
    "hot": [{"temperature": 1.6}],
    "Qwen3's": [{"temperature": 0.6, "top_p": 0.95, "top_k": 20}],
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
    engine: InProcess, options: list[dict[str, Any]], logits: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Draw by the same logits for each of these requests at each of these positions: [B, w]."""
    reqs: list[Any] = []
    for each in options:
        params = SamplingParams(max_new_tokens=8, **each)
        params.normalize(None)
        reqs.append(types.SimpleNamespace(sampling_params=params, custom_logit_processor=None))
    batch = ScheduleBatch(reqs=reqs, device="cpu")
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, VOCAB)
    batch.req_pool_indices = torch.arange(len(reqs)).flip(0)
    kernels = Kernels.on("cpu")
    noise = Noise(len(reqs), "cpu", kernels, binding=False, seed="3")
    noise.begin(reqs, batch.req_pool_indices)
    places = positions.expand(len(reqs), -1)
    block = Block(places, places, places)
    rows = logits.repeat(places.numel(), 1)
    draw = TargetSampler(noise, RequestedRules(), kernels)
    drawn = draw(rows, SamplingInput.of(batch, block), block.flatten(block.positions))
    return block.unflatten(drawn)


@pytest.fixture(scope="module")
def logits() -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(4)) * 1.5


def p_value(drawn: torch.Tensor, expected: torch.Tensor) -> float:
    """Chi-square of drawn tokens; a token of probability 0 that was drawn gives 0."""
    counts = torch.bincount(drawn.flatten(), minlength=len(expected)).double()
    possible = expected > 0
    if counts[~possible].any():
        return 0.0
    if possible.sum() == 1:
        return 1.0
    return float(chisquare(counts[possible], expected[possible] * counts.sum()).pvalue)


def independence(first: torch.Tensor, second: torch.Tensor) -> float:
    """Chi-square of pairs of draws: whether the one tells anything of the other."""
    pairs = torch.zeros(VOCAB, VOCAB, dtype=torch.int64)
    ones = torch.ones(first.numel(), dtype=torch.int64)
    pairs.index_put_((first.flatten(), second.flatten()), ones, accumulate=True)
    pairs = pairs[pairs.sum(dim=1) > 500][:, pairs.sum(dim=0) > 500]
    return float(chi2_contingency(pairs.numpy()).pvalue)


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_distribution(engine: InProcess, logits: torch.Tensor, mix: str) -> None:
    """p > 0.001 for every request of the mix, of 200,000 draws."""
    drawn = draw_many(engine, MIXES[mix] * REQUESTS, logits, torch.arange(POSITIONS))
    for i, options in enumerate(MIXES[mix]):
        assert p_value(drawn[i :: len(MIXES[mix])], distribution(logits, **options)) > 0.001


def test_a_wrong_rule_fails(engine: InProcess, logits: torch.Tensor) -> None:
    """The control: committing the draft with the probability of *another* token is noticed."""
    expected = distribution(logits)
    drawn = draw_many(engine, MIXES["plain"], logits, torch.arange(POSITIONS))[0]
    assert p_value(drawn, expected) > 0.001
    draft = int(expected.argsort(descending=True)[1])
    lossy = torch.where(torch.rand(len(drawn)) < 0.1, torch.tensor(draft), drawn)
    assert p_value(lossy, expected) < 0.001


def answers_of_one_request() -> list[dict[str, Any]]:
    """The parameters of the answers that SGLang sends for one request with `n`."""
    params, sent = SamplingParams(sampling_seed=7, n=REQUESTS), []
    for _ in range(REQUESTS):
        request = types.SimpleNamespace(sampling_params=params)
        seed_answers_apart(None, request)
        sent.append({"temperature": 1.0, "sampling_seed": request.sampling_params.sampling_seed})
    return sent


@pytest.mark.parametrize("kind", ["requests", "answers to one request"])
def test_no_noise_is_used_twice(engine: InProcess, logits: torch.Tensor, kind: str) -> None:
    """Draws of neighbouring positions and of other requests tell nothing of each other."""
    asked = [{"temperature": 1.0}] * REQUESTS if kind == "requests" else answers_of_one_request()
    drawn = draw_many(engine, asked, logits, torch.arange(POSITIONS))
    assert independence(drawn[:, :-1], drawn[:, 1:]) > 0.001
    assert independence(drawn[:-1], drawn[1:]) > 0.001
    assert independence(drawn[:-1, 1:], drawn[1:, :-1]) > 0.001


def test_noise_that_is_used_twice_is_seen(engine: InProcess, logits: torch.Tensor) -> None:
    """The control, with the same position twice, and with two requests of one seed."""
    positions = torch.arange(POSITIONS) // 2
    drawn = draw_many(engine, [{"temperature": 1.0}] * REQUESTS, logits, positions)
    assert independence(drawn[:, ::2], drawn[:, 1::2]) == 0.0
    seeded = {"temperature": 1.0, "sampling_seed": 7}
    first, second = draw_many(engine, [seeded] * 2, logits, torch.arange(POSITIONS))
    assert independence(first, second) == 0.0


def test_accepted_and_bonus_tokens_together_have_the_distribution(
    engine: InProcess, logits: torch.Tensor
) -> None:
    """The first committed token of a block, accepted or not, is the target's own draw."""
    expected = distribution(logits)
    positions = torch.arange(POSITIONS)
    drawn = draw_many(engine, MIXES["plain"], logits, positions)[0].view(-1, 2)
    draft = int(expected.argmax())
    block = torch.tensor([[0, draft]]).expand(len(drawn), -1)
    num_accepted, bonus = accept(block, drawn)
    first = torch.where(num_accepted > 0, block[:, 1], bonus)
    probability = float(expected[draft])
    sigma = (probability * (1 - probability) / len(drawn)) ** 0.5
    assert num_accepted.double().mean() == pytest.approx(probability, abs=4 * sigma)
    assert p_value(first, expected) > 0.001


def test_sampled_requests_are_drawn_not_argmax(engine: InProcess) -> None:
    """A sampled request differs from the greedy one, and between two runs."""
    outputs = {
        tuple(engine.generate(prompt(1, 9), temperature=2.0, max_new_tokens=30, ignore_eos=True))
        for _ in range(3)
    }
    assert len(outputs) == 3
