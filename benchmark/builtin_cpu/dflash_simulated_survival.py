"""Simulates drafts whose acceptance is known by position, with probabilities that know of it.

It does nothing unless `DFLASH_SIMULATED_SURVIVAL` names one of `PROFILES`. The answers mean
nothing. A draft's outcome is a function of its request's prompt, the anchor's position and its
place in the block. So all servers, whatever they verify, get the same drafts.

The probability q of a draft is drawn from a Beta distribution whose mean is the profile's, and it
is accepted with probability q. CONCENTRATION says how far apart sure and doubtful drafts are. It
fits three measured pairs: to cut each block where the product of q falls below a threshold keeps
92 % of the accept length at 4.7 of 8 rows, 98 % at 4.7 of 16, and 95 % at 11.9 of 16.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

logger = logging.getLogger(__name__)

NAME = "DFLASH_SIMULATED_SURVIVAL"
# P(a draft is accepted | all before it are), by position. Qwen3-8B on MATH-500 at temperature 0,
# from the histogram of figure 4 of arXiv 2604.12989: accept length 7.66.
MATH_500 = [0.90, 0.87, 0.87, 0.88, 0.88, 0.90, 0.90, *[0.91] * 4, 0.90, 0.90, 0.90, 0.89]
# The same, to a power that gives the accept length of MT-Bench there.
PROFILES = {"math_500": MATH_500, "mt_bench": [round(p**2.19, 3) for p in MATH_500]}
CONCENTRATION = 0.35
PLACES = 8191  # drawn blocks; a text goes through them one by one


def install() -> None:
    if NAME not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.init_model_worker", attach, HookType.AFTER
    )


def attach(_: None, scheduler: Any) -> None:
    """AFTER `Scheduler.init_model_worker`: change the drafts of a `DFlashWorker`, if any."""
    if scheduler.spec_algorithm.is_none():
        return
    if not hasattr(scheduler.draft_worker, "drafter"):
        raise SystemExit(f"{NAME} works with sglang-dflash only.")
    survival = PROFILES[os.environ[NAME]]
    logger.warning("SIMULATED SURVIVAL of %s: output is meaningless.", os.environ[NAME])
    Simulated(scheduler.draft_worker, *drawn(survival))


def drawn(survival: list[float], seed: int = 1) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Probabilities, [PLACES, N-1] float32, and how many drafts are right, [PLACES] int64."""
    rng, mean = np.random.default_rng(seed), np.array(survival)
    size = PLACES, len(survival)
    q = rng.beta(CONCENTRATION * mean, CONCENTRATION * (1 - mean), size=size)
    right = (rng.random(size) < q).cumprod(axis=1).sum(axis=1)
    return q.astype(np.float32), right


class Simulated:
    """The drafts of a worker: their probabilities, and how many of each block are accepted."""

    def __init__(
        self, worker: Any, probabilities: npt.NDArray[Any], right: npt.NDArray[Any]
    ) -> None:
        device, drafts = worker.device, worker.drafter._block_size - 1
        assert drafts == probabilities.shape[1], (
            f"the profiles have {probabilities.shape[1]} drafts"
        )
        self._probabilities = torch.from_numpy(probabilities).to(device)
        self._right = torch.from_numpy(right).to(device)
        self._begins = torch.zeros(len(worker.slots.table), dtype=torch.int64, device=device)
        worker.prefill.run = self._beginning(worker.prefill.run)
        worker.drafter.propose = self._proposing(worker.drafter.propose)
        worker.verifier._simulated = self.accepted
        worker.verifier._simulated_length = 1.0

    def _beginning(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A prompt decides where its request begins."""

        def begin(batch: Any) -> Any:
            places = [
                zlib.crc32(np.array(req.origin_input_ids, dtype=np.int64).tobytes())
                for req in batch.reqs
            ]
            self._begins[batch.req_pool_indices] = torch.tensor(places, device=self._begins.device)
            return run(batch)

        return begin

    def _proposing(self, propose: Callable[..., Any]) -> Callable[..., Any]:
        def proposed(batch: Any, *where: Any) -> Any:
            block = propose(batch, *where)
            if block.probabilities is None:
                return block
            at = self._places(batch, block.positions)
            return replace(block, probabilities=self._probabilities[at])

        return proposed

    def accepted(self, batch: Any, block: Any) -> Tensor:
        """The drafts of each request that are right, [B] int64."""
        return self._right[self._places(batch, block.positions)]

    def _places(self, batch: Any, positions: Tensor) -> Tensor:
        return (self._begins[batch.req_pool_indices] + positions[:, 0]) % PLACES
