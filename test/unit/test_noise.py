"""The noise of draws, by itself: its distribution, and what sharing it gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.kernels import Kernels
from sglang_dflash.kernels.draw import Sampling, draw_in_torch
from sglang_dflash.method.noise import SHARES, gumbel, hash32
from sglang_dflash.step.noise import Noise


def test_noise_is_gumbels() -> None:
    """Against float64, and the moments of the distribution."""
    seed, position, ids = torch.tensor([-9]), torch.tensor([40_000]), torch.arange(2_000_000)
    numbers = gumbel(seed, position, ids)
    u = ((hash32(seed, position, ids).long() & 0xFFFFFFFF).double() + 0.5) / 2**32
    torch.testing.assert_close(numbers.double(), -(-u.log()).log(), rtol=1e-6, atol=1e-6)
    assert numbers.double().mean() == pytest.approx(0.5772, abs=0.004)
    assert numbers.double().var() == pytest.approx(1.6449, abs=0.01)


def test_a_draft_that_is_its_target_is_always_right() -> None:
    """The control of all: logits that are equal draw equal tokens at the whole noise alone."""
    logits = torch.randn(400, 200, generator=torch.Generator().manual_seed(3)) * 2
    seeds, positions = torch.full((400, 1), 5), torch.arange(400)[:, None]
    noise = gumbel(seeds, positions, torch.arange(200))
    drawn = (logits / 0.7 + noise).argmax(dim=1)
    equal = [((logits + 0.7 * s * noise).argmax(dim=1) == drawn).float().mean() for s in SHARES]
    assert equal[-1] == 1
    assert equal[0] < 0.5 < equal[1] < equal[2] < 1


def request(**options: Any) -> Any:
    params = SamplingParams(**options)
    params.normalize(None)
    return SimpleNamespace(sampling_params=params)


@pytest.mark.parametrize("temperature", [0.6, 0.8, 1.5])
@pytest.mark.parametrize("filters", [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.1}], ids=str)
def test_the_distribution_of_draws(temperature: float, filters: dict[str, Any]) -> None:
    """200,000 draws of ten requests, chi-square. The probabilities are computed in float64."""
    logits = torch.randn(12, generator=torch.Generator().manual_seed(4))
    reqs = [request(temperature=temperature, **filters) for _ in range(10)]
    rows = torch.arange(10).flip(0)
    noise = Noise(10, "cpu", Kernels.on("cpu"), binding=False, seed="2 None")
    noise.begin(reqs, rows)
    params = reqs[0].sampling_params
    each: list[Any] = [params.temperature, params.top_k, params.top_p, params.min_p]
    of_all = [torch.full((10,), value) for value in each]
    sampling = Sampling(of_all[0], of_all[1], of_all[2], of_all[3], rows, noise.table.seeds, True)
    positions = torch.arange(20_000).repeat(10)
    drawn = draw_in_torch(logits.expand(len(positions), -1), sampling, positions, None)

    probs, order = (logits.double() / temperature).softmax(dim=0).sort(descending=True)
    kept = torch.arange(12) < params.top_k
    kept &= (probs.cumsum(dim=0) - probs <= params.top_p) & (probs >= params.min_p * probs[0])
    counts = torch.bincount(drawn, minlength=12)[order].double()
    assert counts[~kept].sum() == 0
    expected = probs[kept] / probs[kept].sum() * len(drawn)
    assert chisquare(counts[kept], expected).pvalue > 0.001
    moved = 0.03 * expected[0]  # the control: a few of its draws are another token
    expected[0] -= moved
    expected[1] += moved
    assert chisquare(counts[kept], expected).pvalue < 0.001


def test_seeds() -> None:
    """Each request has one of its own for all its life; a request's own seed is kept."""
    rows = torch.arange(4)
    reqs = [request(), request(), request(sampling_seed=5), request(sampling_seed=2**64 + 3)]
    noise = Noise(4, "cpu", Kernels.on("cpu"), binding=False, seed="2 None")
    noise.begin(reqs, rows)
    seeds = noise.table.seeds.tolist()
    assert len(set(seeds)) == 4
    assert seeds[2:] == [5, 3]
    noise.begin(reqs[:1], rows[3:])  # it was retracted, and has another row
    assert noise.table.seeds[3] == seeds[0]
    again = Noise(4, "cpu", Kernels.on("cpu"), binding=False, seed="2 None")
    again.begin([request(), request()], rows[:2])
    assert again.table.seeds[:2].tolist() == seeds[:2]  # as on every rank
