"""The noise of a draw: a number for each token of the vocabulary, made of seed and position.

argmax(logits / T + noise) is a draw from softmax(logits / T), if the noise is Gumbel's (Maddison et
al. 2014, section 2). It is a function of a request's seed, the position and the token, so the draft
can know the noise of the target's draw before the target runs. The argmax of its own logits with
the same noise is the same token more often than any draft that is blind to it, and acceptance asks
for nothing else: the draft is chosen before the target's logits are seen.

Where the target is surer than its draft, less noise is better: none, or a share of it. Which one is
seen from the tokens that each share would have drafted, after every step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# What drafts are drawn at, in units of the target's temperature. The first one is the argmax. As
# many as a power of two, because kernels have a row of a tile for each.
SHARES = (0.0, 0.5, 0.75, 1.0)
BEGIN = 1  # the share before anything is known
RECENT = 0.1  # the weight of a step among a request's
RECENT_OF_ALL = 0.02  # and of a request's step among all


class NoiseTable(NamedTuple):
    """What the noise of requests is made of, by their row of `req_to_token`."""

    seeds: Tensor  # [R] int64
    temperatures: Tensor  # [R] float32, the target's; 0: its draw has no noise by token to share
    scores: Tensor  # [R + 1, C] float32, drafts that each share gets right; the last row: of all
    shares: Tensor  # [C] float32, SHARES

    @classmethod
    def empty(cls, rows: int, device: str) -> NoiseTable:
        """rows: R."""
        seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        scores = torch.zeros(rows + 1, len(SHARES), device=device)
        scores[:, BEGIN] = 1e-3
        shares = torch.tensor(SHARES, device=device)
        return cls(seeds, torch.zeros(rows, device=device), scores, shares)


class DraftNoise(NamedTuple):
    """The noise at the drafts of B requests, M of each, and the share of it that is best so far."""

    table: NoiseTable
    rows: Tensor  # [B] integers, rows of the table
    positions: Tensor  # [B] int64, of the anchors; the target draws the first draft there
    choices: Tensor  # [B] int64, the share of each request's drafts, an index of SHARES
    ids: Tensor  # [columns] int32, the token of each column of the logits
    first: int = 0  # the number of the first of the M drafts

    def drafts(self, tokens: int) -> int:
        """The drafts of each request, of so many in all."""
        return tokens // max(1, len(self.rows))

    @classmethod
    def after(cls, table: NoiseTable, rows: Tensor, positions: Tensor, ids: Tensor) -> DraftNoise:
        """That of the drafts after anchors at these positions, [B] int64. rows: of the table."""
        choices = table.scores.index_select(0, rows).argmax(dim=1)
        return cls(table, rows, positions, choices, ids)

    def of(self, requests: slice | Tensor) -> DraftNoise:
        """That of some requests."""
        return self._replace(
            rows=self.rows[requests],
            positions=self.positions[requests],
            choices=self.choices[requests],
        )

    def at(self, draft: int) -> DraftNoise:
        """That of one draft of each request, M = 1."""
        return self._replace(first=draft)

    def scales(self) -> Tensor:
        """The factor of the noise at each share: [B, C] float32."""
        return self.table.temperatures.index_select(0, self.rows)[:, None] * self.table.shares

    def gumbel(self, drafts: int, ids: Tensor) -> Tensor:
        """The noise of tokens: [B, M, ..] float32. ids: [B, M, ..] integers, or [..] of all."""
        number = torch.arange(self.first, self.first + drafts, device=self.rows.device)
        positions = self.positions[:, None] + number
        seeds = self.table.seeds[self.rows, None].expand_as(positions)
        return gumbel(seeds[..., None], positions[..., None], ids)


def gumbel(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Numbers with Gumbel's distribution: float32, of the shape that all three broadcast to.

    seeds, positions: int64; ids: integers.

    Up to rounding, it is SGLang's noise of seeded draws (`multinomial_with_seed`): -log(-log(u))
    with u = (hash + 1/2) / 2**32. Near 1, where the largest numbers are, 1 - u is exact and u is
    not.
    """
    centred = (hash32(seeds, positions, ids).float() + 0.5) * 2.0**-32  # u, or u - 1 below 0
    of_small = centred.clamp(min=1e-10).log()  # on a CPU the logarithm of a negative number is slow
    return torch.where(centred > 0, of_small, centred.log1p()).neg_().log_().neg_()


def hash32(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """MurmurHash3 (x86, 32 bit) of four words: seed low, seed high, position, id.

    seeds, positions: int64; ids: integers. The result has the bits of the hash as int32.
    """
    state = torch.zeros((), dtype=torch.int32, device=seeds.device)
    for word in (seeds, seeds >> 32, positions, ids):
        word = _rotate(word.int() * _signed(0xCC9E2D51), 15) * _signed(0x1B873593)
        state = _rotate(state ^ word, 13) * 5 + _signed(0xE6546B64)
    state ^= 16  # bytes
    state ^= _shift(state, 16)
    state *= _signed(0x85EBCA6B)
    state ^= _shift(state, 13)
    state *= _signed(0xC2B2AE35)
    state ^= _shift(state, 16)
    return state


def _rotate(x: Tensor, bits: int) -> Tensor:
    return (x << bits).bitwise_or_(_shift(x, 32 - bits))


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift to the right, without the sign."""
    return (x >> bits).bitwise_and_((1 << 32 - bits) - 1)


def _signed(word: int) -> int:
    """The number that has these 32 bits as int32."""
    return word - (word >> 31 << 32)
