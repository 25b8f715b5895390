"""Verifies of any part of each block, whatever pays."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sglang_dflash.adaptive.verify_width import AdaptiveChoice
from sglang_dflash.method.block import Block, Ragged


def verify_parts(worker: Any, part: Callable[[Block], Block]) -> None:
    """Verify this part of every block. The policy of a running worker learns from it all the same.

    The worker's verify width is `auto`.
    """
    policy = worker.verify_width
    chosen = policy.choose

    def choose(block: Block, reqs: list[Any]) -> AdaptiveChoice:
        return AdaptiveChoice(part(block), chosen(block, reqs).learn)

    policy.choose = choose


def verify_any_rows(worker: Any, seed: int = 3) -> set[tuple[int, int]]:
    """Verify as many rows of each batch as the target can, in turn, and any of its requests.

    Returns a set that gets the requests and rows of each verify.
    """
    rng, shapes = random.Random(seed), worker.graphs
    turns: dict[int, Iterator[int]] = {}
    verified: set[tuple[int, int]] = set()

    def part(block: Block) -> Block:
        requests = len(block.slots)
        rows = next(turns.setdefault(requests, itertools.cycle(shapes.options(requests))))
        verified.add((requests, rows))
        if not shapes.ragged:
            return block.first(rows // requests)
        return (
            block if rows == block.rows else cut(block, _widths(rng, requests, rows, block.width))
        )

    verify_parts(worker, part)
    return verified


def cut(block: Block, widths: list[int]) -> Block:
    """The first positions of each request of a block."""
    ragged = Ragged.of(torch.tensor(widths), block.width)
    device = block.slots.device
    return block.cut(Ragged(ragged.lens.to(device), ragged.indices.to(device)))


def _widths(rng: random.Random, requests: int, rows: int, most: int) -> list[int]:
    """Widths of so many rows in all, each 1 to `most`."""
    widths = [1] * requests
    while sum(widths) < rows:
        widths[rng.choice([i for i, width in enumerate(widths) if width < most])] += 1
    return widths
