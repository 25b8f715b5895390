"""The penalties of a block equal those of decoding one token at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dflash.logits.penalties import MinLength, Penalties, Penalty

VOCAB = 7


def state(
    frequency: float, presence: float, repetition: float, min_length: int, stop: int
) -> Penalties:
    """An empty state of one request."""
    bias = torch.zeros(1, VOCAB)
    bias[0, stop] = float("-inf")
    return Penalties(
        frequency=Penalty(torch.zeros(1, VOCAB), torch.tensor([[frequency]])),
        presence=Penalty(torch.zeros(1, VOCAB), torch.tensor([[presence]])),
        repetition=Penalty(torch.ones(1, VOCAB), torch.tensor([[repetition]])),
        min_length=MinLength(
            torch.zeros(1, 1, dtype=torch.int32),
            torch.tensor([[min_length]], dtype=torch.int32),
            bias,
        ),
    )


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
        st.integers(0, 9),
        st.integers(0, VOCAB - 1),
    ),
    st.integers(0, 2**31),
)
def test_block_equals_single_tokens(
    output: list[int], block: list[int], parameters: tuple[float, float, float, int, int], seed: int
) -> None:
    logits = torch.randn(1, len(block), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    penalties = state(*parameters)
    if output:
        penalties.advance(torch.tensor([output]), torch.tensor([len(output)]))
    expected = torch.stack(
        [slow(logits[0, j], output + block[: j + 1], *parameters) for j in range(len(block))]
    )
    got = logits.clone()
    penalties.apply(got, torch.tensor([block]))
    torch.testing.assert_close(got[0], expected)
    for taken in range(1, len(block) + 1):
        after = state(*parameters)
        if output:
            after.advance(torch.tensor([output]), torch.tensor([len(output)]))
        after.advance(torch.tensor([block]), torch.tensor([taken]))
        once = logits[:, :1].clone()
        after.apply(once, None)
        torch.testing.assert_close(
            once[0, 0], slow(logits[0, 0], output + block[:taken], *parameters)
        )


def test_nothing_asked_changes_nothing() -> None:
    logits = torch.randn(2, 3, VOCAB)
    got = logits.clone()
    Penalties().apply(got, torch.zeros(2, 3, dtype=torch.long))
    assert torch.equal(got, logits)


@pytest.mark.parametrize("block", [None, torch.tensor([[1, 1, 2]])])
def test_dtype_is_kept(block: torch.Tensor | None) -> None:
    logits = torch.randn(1, 1 if block is None else 3, VOCAB, dtype=torch.bfloat16)
    state(0.5, 0.1, 1.2, 3, 2).apply(logits, block)
    assert logits.dtype == torch.bfloat16
