"""The kernels of noise and draws equal their references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_dflash.kernels.argmax import Largest, largest_in_torch, launch_largest
from sglang_dflash.kernels.biased_argmax import biased_largest_in_torch, launch_biased_largest
from sglang_dflash.kernels.draw import Sampling, draw_in_torch, launch_draw
from sglang_dflash.kernels.noise import gumbel_in_torch, launch_gumbel
from sglang_dflash.kernels.shares import judge_shares_in_torch, launch_judge_shares
from sglang_dflash.method.noise import SHARES, DraftNoise, NoiseTable

CUDA = "cuda"


def to_cuda(values: Any) -> Any:
    """A copy on the device of a tuple of tensors and numbers."""
    if isinstance(values, tuple):
        copied = [to_cuda(each) for each in values]
        return type(values)(*copied) if hasattr(values, "_fields") else tuple(copied)
    return values.clone().to(CUDA) if isinstance(values, Tensor) else values


def noise(requests: int, size: int, first: int = 0) -> DraftNoise:
    """Of requests in other rows, every third one without noise."""
    table = NoiseTable.empty(requests + 5, "cpu")
    table.seeds.random_(-(2**63), 2**63 - 1)
    table.temperatures.uniform_(0.2, 1.5)[::3] = 0
    rows = torch.randperm(requests + 5)[:requests]
    positions = torch.randint(2**18, (requests, 4))[:, 0]  # apart in memory
    ids = torch.randperm(3 * size)[:size].int()
    return DraftNoise.after(table, rows, positions, ids)._replace(first=first)


def assert_equal(ours: Largest, reference: Largest, return_probs: bool) -> None:
    assert torch.equal(ours.argmax.cpu(), reference.argmax)
    torch.testing.assert_close(ours.value.cpu(), reference.value)
    assert (ours.sum_exp is None) == (reference.sum_exp is None) == (not return_probs)
    if ours.sum_exp is not None and reference.sum_exp is not None:
        torch.testing.assert_close(ours.sum_exp.cpu(), reference.sum_exp)


@pytest.mark.parametrize(("drafts", "size"), [(1, 5), (3, 4096), (7, 10_000)])
@pytest.mark.parametrize("return_probs", [True, False])
def test_the_largest_with_noise(drafts: int, size: int, return_probs: bool) -> None:
    torch.manual_seed(size)
    asked = noise(5, size, first=drafts - 1)
    logits = torch.randn(5 * drafts, size + 3)[:, :size]
    reference = largest_in_torch(logits, return_probs, asked)
    assert reference.argmax.shape == (5 * drafts, len(SHARES) + 1)
    assert_equal(
        launch_largest(logits.to(CUDA), return_probs, to_cuda(asked)), reference, return_probs
    )


@pytest.mark.parametrize(("requests", "size", "rank"), [(1, 5, 3), (19, 1000, 70)])
@pytest.mark.parametrize("return_probs", [True, False])
def test_the_largest_biased_with_noise(
    requests: int, size: int, rank: int, return_probs: bool
) -> None:
    torch.manual_seed(size)
    asked = noise(requests, size, first=4)
    logits = torch.randn(requests, size)
    latent, weight = torch.randn(requests, rank), torch.randn(size, rank) / 4
    reference = biased_largest_in_torch(logits, latent, weight, return_probs, asked)
    on_device = to_cuda((logits, latent, weight, return_probs, asked))
    ours = launch_biased_largest(*on_device)
    assert_equal(ours, reference, return_probs)


def test_without_noise_every_share_is_the_argmax() -> None:
    torch.manual_seed(1)
    asked = noise(4, 100)
    asked.table.temperatures.zero_()
    logits = torch.randn(8, 100)
    found = launch_largest(logits.to(CUDA), False, to_cuda(asked)).argmax
    assert torch.equal(found.cpu(), logits.argmax(dim=1)[:, None].expand(-1, len(SHARES) + 1))


def test_the_noise_of_a_few_tokens() -> None:
    torch.manual_seed(2)
    asked = noise(3, 10, first=2)
    ids = torch.randint(200_000, (3, 5, 6))
    ours = launch_gumbel(to_cuda(asked), ids.to(CUDA)).cpu()
    torch.testing.assert_close(ours, gumbel_in_torch(asked, ids))
    assert ours.unique().numel() > 80


@pytest.mark.parametrize("filters", [True, False])
@pytest.mark.parametrize("ragged", [True, False])
def test_draws(filters: bool, ragged: bool) -> None:
    torch.manual_seed(3)
    size, each, positions = 5000, 8, 24
    sampling = Sampling(
        torch.full((each,), 0.8),
        torch.tensor([1, 2**30, 20, 2**30, 2**30, 5, 2**30, 300]).int(),
        torch.tensor([1.0, 1.0, 1.0, 0.7, 1.0, 0.8, 0.0, 0.95]),
        torch.tensor([0.0, 0.0, 0.0, 0.0, 0.1, 0.02, 0.0, 0.0]),
        torch.randperm(20)[:each],
        torch.randint(-(2**62), 2**62, (20,)),
        filters,
    )
    logits = torch.randn(positions, size) * 2
    logits[:, 77] = logits.amax(dim=1)  # a tie
    logits[5, 40:] = float("-inf")
    logits[8] = float("-inf")
    requests = torch.randint(each, (positions,)) if ragged else None
    places = torch.randint(4000, (positions,))
    reference = draw_in_torch(logits, sampling, places, requests)
    ours = launch_draw(*to_cuda((logits, sampling, places, requests)))
    assert torch.equal(ours.cpu(), reference)


@pytest.mark.parametrize("width", [4, 8])
def test_shares_are_judged(width: int) -> None:
    torch.manual_seed(width)
    table = NoiseTable.empty(50, "cpu")
    table.temperatures.uniform_(0.2, 1.5)[::3] = 0
    table.scores.uniform_(0, 5)
    rows = torch.randperm(50)[:21]
    picks = torch.randint(2, (len(SHARES), 21, 8))
    sampled, accepted = torch.randint(2, (21, width)), torch.randint(width, (21, 2))[:, 0]
    on_device = to_cuda((picks, sampled, accepted, rows, table))
    before = table.scores.clone()
    judge_shares_in_torch(picks, sampled, accepted, rows, table)
    launch_judge_shares(*on_device)
    torch.testing.assert_close(on_device[-1].scores.cpu(), table.scores)
    assert (before != table.scores).any(dim=1).sum() == 1 + (table.temperatures[rows] > 0).sum()
