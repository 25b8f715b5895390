"""Drafters for tests: one records the proposed blocks, one forces the accepted counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sglang_dflash.method.block import Block
from sglang_dflash.step.draft_ahead import DraftAhead
from sglang_dflash.step.propose import Drafter


def put_drafter(worker: Any, drafter: Any) -> None:
    """Make a running worker use this drafter for every draft."""
    worker.drafter = drafter
    if isinstance(worker.next_draft, DraftAhead):
        worker.next_draft._drafter = drafter


@dataclass
class Recorder:
    """Drafts as `inner` does. `blocks[rid]` is the list of drafted blocks of a request."""

    inner: Drafter
    blocks: dict[str, list[list[int]]] = field(default_factory=dict)

    def propose(self, batch: Any, *where: Any) -> Block:
        block = self.inner.propose(batch, *where)
        for req, row in zip(batch.reqs, block.token_ids.tolist(), strict=True):
            self.blocks.setdefault(req.rid, []).append(row)
        return block


@dataclass
class Forced:
    """Runs the real draft, then replaces its tokens so that exactly `accept(req)` are accepted.

    `truth[rid]` is the target's own continuation, known from a run without speculation.
    """

    inner: Drafter
    accept: Callable[[Any], int]
    truth: dict[str, list[int]] = field(default_factory=dict)
    vocab_size: int = 160

    def propose(self, batch: Any, *where: Any) -> Block:
        block = self.inner.propose(batch, *where)
        tokens = block.token_ids.clone()
        for row, req in enumerate(batch.reqs):
            committed = int(block.positions[row, 0]) + 1 - len(req.origin_input_ids)
            ahead = self.truth[req.rid][committed:]
            count = self.accept(req)
            for j in range(1, tokens.shape[1]):
                right = ahead[j - 1] if j <= len(ahead) else 0
                tokens[row, j] = right if j <= count else (right + 1) % self.vocab_size
        assert torch.equal(tokens[:, 0], block.token_ids[:, 0])
        return replace(block, token_ids=tokens)


@dataclass
class Remembered:
    """Runs the real draft, then proposes what the same prompt was answered before."""

    inner: Drafter
    answers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def propose(self, batch: Any, *where: Any) -> Block:
        block = self.inner.propose(batch, *where)
        tokens = block.token_ids.clone()
        for row, req in enumerate(batch.reqs):
            answer = self.answers.setdefault(tuple(req.origin_input_ids), [])
            answer += req.output_ids[len(answer) :]
            committed = int(block.positions[row, 0]) + 1 - len(req.origin_input_ids)
            ahead = answer[committed : committed + tokens.shape[1] - 1]
            tokens[row, 1 : 1 + len(ahead)] = torch.tensor(ahead, dtype=tokens.dtype)
        return replace(block, token_ids=tokens)
