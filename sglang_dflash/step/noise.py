"""Where the noise of requests is kept: a seed for each, and what their drafts make of it."""

from __future__ import annotations

from random import Random

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams
from torch import Tensor

from sglang_dflash.kernels import Kernels
from sglang_dflash.method.block import Block
from sglang_dflash.method.noise import NoiseTable
from sglang_dflash.step.copies import to_device

SEED_OF_SGLANG = 42  # of requests without one, if seeds bind


def is_sampled(req: Req) -> bool:
    """Whether a request's tokens are drawn. SGLang gives greedy requests `top_k` 1."""
    return bool(req.sampling_params.top_k > 1)


def has_filter(params: SamplingParams) -> bool:
    """Whether tokens are filtered by top_k or top_p."""
    return bool(params.top_k != TOP_K_ALL or params.top_p != 1.0)


class Noise:
    """The noise of all requests, by their row of `req_to_token`. It is the same on every rank."""

    def __init__(self, rows: int, device: str, kernels: Kernels, binding: bool, seed: str) -> None:
        """rows: of `req_to_token`; seed: the server's and the replica's, the same on every rank.

        binding: a draw is SGLang's own of the request's seed (`--enable-deterministic-inference`).
        Its noise is by token, too, unless the request has a filter. Then it is by rank.
        """
        self.table = NoiseTable.empty(rows, device)
        self._kernels = kernels
        self._binding = binding
        self._random = Random(seed)

    def begin(self, reqs: list[Req], rows: Tensor) -> None:
        """Keep the noise of requests that are prefilled. rows: [B] integers on the device."""
        table, device = self.table, rows.device
        temperatures = [self._temperature(req) for req in reqs]
        table.temperatures[rows] = to_device(temperatures, device, table.scores.dtype)
        if any(map(is_sampled, reqs)):
            table.seeds[rows] = to_device([self._seed(req) for req in reqs], device)
            table.scores[rows] = table.scores[-1].clone()

    def learn(
        self, reqs: list[Req], rows: Tensor, block: Block, drawn: Tensor, right: Tensor
    ) -> None:
        """Judge the shares of a block's noise. drawn: [B, w] int64; right: [B], accepted drafts."""
        if block.picks is not None and any(map(is_sampled, reqs)):
            self._kernels.judge_shares(block.picks, drawn, right, rows, self.table)

    def _temperature(self, req: Req) -> float:
        params = req.sampling_params
        if not is_sampled(req) or (self._binding and has_filter(params)):
            return 0.0
        return float(params.temperature)

    def _seed(self, req: Req) -> int:
        """A request's seed for all its life, as int64."""
        if not hasattr(req, "dflash_seed"):
            seed = req.sampling_params.sampling_seed
            if self._binding and seed is None:
                seed = SEED_OF_SGLANG
            if not isinstance(seed, int):
                seed = self._random.getrandbits(64)
            req.dflash_seed = (seed + 2**63) % 2**64 - 2**63
        return int(req.dflash_seed)
