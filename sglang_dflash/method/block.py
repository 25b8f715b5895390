"""A block: positions after a context, which the draft fills and the target verifies."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """N positions of B requests: the anchor, then drafts.

    Requests may have fewer positions than N (`ragged`). A forward has a row for each position that
    is there, T in all.
    """

    token_ids: Tensor  # [B, N] int64, column 0 is the anchor
    positions: Tensor  # [B, N] int64, in the text
    slots: Tensor  # [B, N] int64, KV slots in both pools
    probabilities: Tensor | None = None  # [B, N-1] float32, the draft's own; None: not asked for
    # [C, B, N] int64, the tokens at each share of the noise (`method.noise`), column 0 the anchor
    picks: Tensor | None = None
    parents: Tensor | None = None  # [B, N] int64, the column before each one; None: a chain
    ragged: Ragged | None = None  # None: every request has N positions

    @property
    def width(self) -> int:
        """Positions N."""
        return self.token_ids.shape[1]

    @property
    def rows(self) -> int:
        """The rows T of a forward. The host knows them, however they are shared out."""
        return self.token_ids.numel() if self.ragged is None else len(self.ragged.indices)

    @property
    def lens(self) -> Tensor | None:
        """The rows of each request, [B] int64 on the device; None: all have N."""
        return None if self.ragged is None else self.ragged.lens

    @property
    def starts(self) -> Tensor:
        """The row of each anchor in a forward, [B] int64."""
        if self.ragged is not None:
            return self.ragged.lens.cumsum(0) - self.ragged.lens
        return torch.arange(len(self.token_ids), device=self.token_ids.device) * self.width

    @property
    def requests(self) -> Tensor | None:
        """The request of each row of a forward, [T] int64. None: all have N, one by one."""
        return None if self.ragged is None else self.ragged.indices // self.width

    def flatten(self, field: Tensor) -> Tensor:
        """The values of a field, [B, N, ..], in the order of a forward: [T, ..]."""
        flat = field.flatten(0, 1)
        return flat if self.ragged is None else flat[self.ragged.indices]

    def unflatten(self, values: Tensor) -> Tensor:
        """Put the values of a forward, [T, ..], at their positions: [B, N, ..]. Others are 0."""
        shape = *self.token_ids.shape, *values.shape[1:]
        if self.ragged is None:
            return values.view(shape)
        padded = values.new_zeros(shape)
        padded.flatten(0, 1)[self.ragged.indices] = values
        return padded

    def expand(self, requests: Tensor) -> Tensor:
        """Repeat each request's value, [B, ..], for its tokens in a forward: [T, ..]."""
        if self.requests is None:
            return requests.repeat_interleave(self.width, dim=0)
        return requests[self.requests]

    def first(self, width: int) -> Block:
        """Cut a chain to its first `width` columns. Probabilities and picks are of whole blocks."""
        assert self.parents is None
        if width == self.width:
            return self
        columns = (self.token_ids[:, :width], self.positions[:, :width], self.slots[:, :width])
        return Block(*columns, picks=self.picks)

    def cut(self, ragged: Ragged) -> Block:
        """Keep these positions of a block that is whole."""
        assert self.ragged is None
        return replace(self, probabilities=None, ragged=ragged)

    def filtered(self, indices: Tensor) -> Block:
        """Keep these requests of a chain that is whole."""
        assert self.ragged is None
        assert self.parents is None
        return Block(
            self.token_ids[indices],
            self.positions[indices],
            self.slots[indices],
            None if self.probabilities is None else self.probabilities[indices],
            None if self.picks is None else self.picks[:, indices],
        )

    def merged(self, other: Block) -> Block:
        """Append the requests of another one. Both are chains that are whole."""
        assert self.ragged is None
        assert self.parents is None
        assert other.ragged is None
        assert other.parents is None
        return Block(
            torch.cat([self.token_ids, other.token_ids]),
            torch.cat([self.positions, other.positions]),
            torch.cat([self.slots, other.slots]),
            _cat(self.probabilities, other.probabilities, 0),
            _cat(self.picks, other.picks, 1),
        )


def _cat(ours: Tensor | None, others: Tensor | None, dim: int) -> Tensor | None:
    return None if ours is None or others is None else torch.cat([ours, others], dim)


@dataclass(frozen=True)
class Ragged:
    """The positions of a block whose requests have different numbers of them, one at least."""

    lens: Tensor  # [B] int64 on the device, positions of each request
    indices: Tensor  # [T] int64 on the device, ascending, in the flattened block

    @classmethod
    def of(cls, widths: Tensor, most: int) -> Ragged:
        """The first positions of each request. widths: [B] int64; most: the block's N.

        Where the widths are on a GPU, the host waits.
        """
        is_there = torch.arange(most, device=widths.device) < widths[:, None]
        return cls(widths, is_there.flatten().nonzero().squeeze(1))
