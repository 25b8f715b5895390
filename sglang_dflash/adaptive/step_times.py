"""Step times, measured at startup with dummy requests."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.model_executor.model_runner import ModelRunner
from torch import Tensor

from sglang_dflash.adaptive.throughput import StepTimes, without_outliers
from sglang_dflash.adaptive.verify_width import Shapes
from sglang_dflash.kernels import Kernels
from sglang_dflash.kernels.next_block import block_positions
from sglang_dflash.method.block import Block
from sglang_dflash.method.survival import SurvivalTable
from sglang_dflash.model.context_kv import ContextKV
from sglang_dflash.step.propose import Drafter
from sglang_dflash.step.verify import Verifier

logger = logging.getLogger(__name__)

REPEATS = 3
MOST_SECONDS = 5
CONTEXT = 256  # tokens before each block


class StepTimer:
    """Times drafts of a number of requests, and verifies of a number of their rows."""

    def __init__(
        self,
        runner: ModelRunner,
        drafter: Drafter,
        verifier: Verifier,
        context_kv: ContextKV,
        draft_window: int | None,
        block_size: int,
        shapes: Shapes,
        kernels: Kernels,
    ) -> None:
        self._block_size, self._shapes, self._kernels = block_size, shapes, kernels
        self._runner, self._drafter, self._verifier = runner, drafter, verifier
        self._context_kv = context_kv
        longest = runner.model_config.context_len - block_size
        self._length = min(CONTEXT, longest, draft_window or CONTEXT)
        # Recurrent states can leave room for fewer requests than the flag says.
        self._most = min(runner.max_running_requests, shapes.most_measured)

    @torch.no_grad()
    def measure(self) -> StepTimes:
        """Seconds of a step by requests and rows, equal on all ranks.

        The shortest of several times of a forward counts. When MOST_SECONDS are over, the largest
        batches may not have been measured.
        """
        logger.info("DFLASH: measuring step times, for up to %d s.", MOST_SECONDS)
        batches = [2**i for i in range(self._most.bit_length()) if 2**i < self._most]
        batches.append(self._most)
        times: dict[tuple[int, int], float] = {}  # by requests and rows; no rows: of a draft
        for batch in batches:  # for each, Triton compiles kernels anew; this is not timed
            self._seconds(batch, min(self._shapes.measured(batch)))
        started = time.monotonic()
        # In turn, so that a slow moment does not hit only one forward.
        for batch in batches * REPEATS:
            if times and self._rank_0(time.monotonic() - started > MOST_SECONDS):
                break
            for rows in (0, *self._shapes.measured(batch)):
                taken = self._seconds(batch, rows)
                times[batch, rows] = min(taken, times.get((batch, rows), taken))
        drafts = {batch: seconds for (batch, rows), seconds in times.items() if rows == 0}
        verifies = without_outliers({key: each for key, each in times.items() if key[1] > 0})
        drafts, verifies = self._rank_0((drafts, verifies))
        logger.info(
            "DFLASH: step times in ms, measured in %.1f s:\n%s",
            time.monotonic() - started,
            _shown(drafts, verifies),
        )
        return StepTimes(drafts, verifies)

    def _rank_0(self, value: Any) -> Any:
        """The value of the first rank. All ranks run the same forwards, and choose by them."""
        return get_tp_group().broadcast_object(value, src=0)

    def _seconds(self, requests: int, rows: int) -> float:
        """Of a draft of these requests, or of a verify of so many rows of them."""
        started = time.perf_counter()
        batch = self._requests(requests)
        if rows == 0:
            self._drafter.dry_run(*batch)
        else:
            self._verify(self._block(batch[1], rows), *batch)
        torch.get_device_module(self._runner.device).synchronize()
        return time.perf_counter() - started

    def _verify(self, block: Block, rows: Tensor, seq_lens: Tensor, seq_lens_cpu: Tensor) -> None:
        adapters = self._adapters(len(rows))
        output = self._verifier.dry_run(block, rows, seq_lens, seq_lens_cpu, adapters)
        sampled = self._kernels.largest(output.next_token_logits).argmax.flatten()
        given = block.token_ids, block.unflatten(sampled), block.slots, seq_lens
        self._kernels.accept(*given, self._length, None, block.lens)
        slots = torch.ones_like(block.flatten(block.slots))  # any slot; no request uses it
        self._context_kv.write(output.hidden_states, block.flatten(block.positions), slots)

    def _adapters(self, requests: int) -> list[str | None] | None:
        """The adapters of dummy requests: those that the server has loaded, in turn."""
        if not self._runner.server_args.enable_lora:
            return None
        manager = self._runner.lora_manager
        loaded = list(manager.loras)[: manager.max_loras_per_batch] or [None]
        manager.fetch_new_loras(set(loaded))
        return [loaded[i % len(loaded)] for i in range(requests)]

    def _block(self, seq_lens: Tensor, rows: int) -> Block:
        """A block of so many rows, as equally many of each request as can be.

        Where they may differ, they are chosen as in a step, which takes as long.
        """
        requests = len(seq_lens)
        dummy = seq_lens.new_zeros(requests, self._block_size)
        block = Block(dummy, block_positions(seq_lens, self._block_size), dummy)
        if not self._shapes.ragged:
            return block.first(rows // requests)
        if rows == block.rows:
            return block
        table = SurvivalTable.empty(self._block_size, self._runner.device)
        probabilities = torch.full(dummy[:, 1:].shape, 0.5, device=dummy.device)
        drafts = probabilities, dummy[:, 0].contiguous()
        chosen = self._kernels.choose_rows(self._kernels.survival(*drafts, table), rows)
        self._kernels.learn_survival(*drafts, chosen.lens - 1, chosen.lens, table)
        return block.cut(chosen.ragged)

    def _requests(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows and lengths of dummy requests: [B] int64 each, the last one on the host."""
        seq_lens_cpu = torch.full((batch,), self._length)
        rows = torch.arange(batch, device=self._runner.device)
        return rows, seq_lens_cpu.to(rows.device), seq_lens_cpu


def _shown(drafts: dict[int, float], verifies: dict[tuple[int, int], float]) -> str:
    """A line of times in ms for each number of requests."""
    lines = []
    for batch, seconds in drafts.items():
        times = [
            f"{rows}: {each * 1000:.1f}"
            for (requests, rows), each in verifies.items()
            if requests == batch
        ]
        lines.append(f"{batch:>8} requests: draft {seconds * 1000:.1f}, verify {' '.join(times)}")
    return "\n".join(lines)
