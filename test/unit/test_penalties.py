"""The penalties of a block equal those of decoding one token at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dflash.logits.penalties import ROWS_AT_ONCE, Bans, Penalties

VOCAB = 7


def penalties(output: list[int], frequency: float, presence: float, repetition: float) -> Penalties:
    """Those of one request after this output."""
    counts = torch.bincount(torch.tensor(output, dtype=torch.long), minlength=VOCAB)
    kinds = (torch.tensor([[value]]) for value in (frequency, presence, repetition))
    return Penalties(counts[None].int(), *kinds)


def bans(output: list[int], block: bool, min_length: int, stop: int) -> Bans:
    positions = max(0, min_length - len(output) - block)
    return Bans(torch.tensor([0]), torch.tensor([stop]), torch.tensor([positions]))


def slow(
    logits: torch.Tensor,
    history: list[int],
    frequency: float,
    presence: float,
    repetition: float,
    min_length: int,
    stop: int,
) -> torch.Tensor:
    """One row of logits after `history`, penalised as in one-token decoding."""
    out = logits.clone()
    for token in range(VOCAB):
        count = history.count(token)
        out[token] -= frequency * count + (presence if count else 0.0)
        if count and repetition != 1.0:
            out[token] = out[token] * repetition if out[token] < 0 else out[token] / repetition
    if len(history) < min_length:
        out[stop] = float("-inf")
    return out


@settings(max_examples=150)
@given(
    st.lists(st.integers(0, VOCAB - 1), max_size=6),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5),
    st.tuples(
        st.sampled_from([0.0, 0.5, -0.3]),
        st.sampled_from([0.0, 0.7]),
        st.sampled_from([1.0, 1.5]),
    ),
    st.tuples(st.integers(0, 9), st.integers(0, VOCAB - 1)),
    st.integers(0, 2**31),
)
def test_block_equals_single_tokens(
    output: list[int],
    block: list[int],
    parameters: tuple[float, float, float],
    least: tuple[int, int],
    seed: int,
) -> None:
    logits = torch.randn(1, len(block), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    rows = [
        slow(logits[0, j], output + block[: j + 1], *parameters, *least) for j in range(len(block))
    ]
    got = logits.clone()
    penalties(output, *parameters).apply(got, torch.tensor([block]))
    bans(output, True, *least).apply(got)
    torch.testing.assert_close(got[0], torch.stack(rows))
    once = logits[:, :1].clone()
    penalties(output, *parameters).apply(once, None)
    bans(output, False, *least).apply(once)
    torch.testing.assert_close(once[0, 0], slow(logits[0, 0], output, *parameters, *least))


def test_bans_are_of_their_request_and_token() -> None:
    logits = torch.zeros(3, 2, VOCAB)
    Bans(torch.tensor([2, 2, 0]), torch.tensor([1, 4, 5]), torch.tensor([1, 1, 9])).apply(logits)
    assert logits.isinf().nonzero().tolist() == [[0, 0, 5], [0, 1, 5], [2, 0, 1], [2, 0, 4]]


def test_nothing_asked_changes_nothing() -> None:
    logits = torch.randn(2, 3, VOCAB)
    got = logits.clone()
    Penalties(torch.ones(2, VOCAB, dtype=torch.int32)).apply(got, torch.zeros(2, 3).long())
    assert torch.equal(got, logits)


@pytest.mark.parametrize("block", [None, torch.tensor([[1, 1, 2]])])
def test_dtype_is_kept(block: torch.Tensor | None) -> None:
    logits = torch.randn(1, 1 if block is None else 3, VOCAB, dtype=torch.bfloat16)
    penalties([1, 2], 0.5, 0.1, 1.2).apply(logits, block)
    assert logits.dtype == torch.bfloat16


def test_many_requests_are_penalised_in_parts() -> None:
    """Each by its own factor, as if it were alone."""
    requests, width = 2 * ROWS_AT_ONCE // 5 + 3, 5
    logits = torch.randn(requests, width, VOCAB, generator=torch.Generator().manual_seed(1))
    blocks = torch.arange(requests * width).view(requests, width) % VOCAB
    counts = torch.arange(requests * VOCAB, dtype=torch.int32).view(requests, VOCAB) % 3
    factors = 1 + torch.arange(requests)[:, None] / 10
    together = logits.clone()
    Penalties(counts, repetition=factors).apply(together, blocks)
    for i in range(requests):
        alone, one = logits[i : i + 1].clone(), slice(i, i + 1)
        Penalties(counts[one], repetition=factors[one]).apply(alone, blocks[one])
        assert torch.equal(alone[0], together[i])
