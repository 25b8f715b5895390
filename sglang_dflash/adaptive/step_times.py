"""Step times, measured at startup with dummy requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.model_executor.model_runner import ModelRunner
from torch import Tensor

from sglang_dflash.adaptive.throughput import Array, StepTimes, without_outliers
from sglang_dflash.kernels.next_block import block_positions
from sglang_dflash.method.block import Block
from sglang_dflash.model.context_kv import ContextKV
from sglang_dflash.step.forward import VerifyInput
from sglang_dflash.step.propose import Drafter
from sglang_dflash.step.verify import Verifier

logger = logging.getLogger(__name__)

MOST_MEASURED = 64  # requests
REPEATS = 3
MOST_SECONDS = 5
CONTEXT = 256  # tokens before each block


class StepTimer:
    """Times drafts and verifies of a number of requests."""

    def __init__(
        self,
        runner: ModelRunner,
        drafter: Drafter,
        verifier: Verifier,
        context_kv: ContextKV,
        draft_window: int | None,
        block_size: int,
    ) -> None:
        self._runner, self._drafter, self._verifier = runner, drafter, verifier
        self._context_kv = context_kv
        longest = runner.model_config.context_len - block_size
        self._length = min(CONTEXT, longest, draft_window or CONTEXT)
        # Recurrent states can leave room for fewer requests than the flag says.
        self._most = min(runner.max_running_requests, MOST_MEASURED)

    @torch.no_grad()
    def measure(self, widths: Sequence[int]) -> StepTimes:
        """Seconds of a step by batch size and verify width, equal on all ranks.

        The shortest of several times of a forward counts. When MOST_SECONDS are over, the largest
        batches may not have been measured.
        """
        logger.info("DFLASH: measuring step times, for up to %d s.", MOST_SECONDS)
        batches = [2**i for i in range(self._most.bit_length()) if 2**i < self._most]
        batches.append(self._most)
        grid = sorted({1, 2, widths[-1] // 2, widths[-1]} if len(widths) > 4 else set(widths))
        measured: dict[int, Array] = {}  # by batch size: a draft, then a verify of each width
        started = time.monotonic()
        # In turn, so that a slow moment does not hit only one forward.
        for batch in batches * REPEATS:
            if measured and self._rank_0(time.monotonic() - started > MOST_SECONDS):
                break
            seconds = [self._seconds(self._draft, batch)]
            seconds += [self._seconds(self._verify, batch, width) for width in grid]
            measured[batch] = np.minimum(seconds, measured.get(batch, np.inf))
        table = self._rank_0(without_outliers(np.stack(list(measured.values()))))
        logger.info(
            "DFLASH: step times in ms, measured in %.1f s:\n%s",
            time.monotonic() - started,
            _shown(list(measured), grid, table),
        )
        steps = {
            (batch, width): float(draft + verify)
            for batch, (draft, *verifies) in zip(measured, table, strict=True)
            for width, verify in zip(grid, verifies, strict=True)
        }
        return StepTimes(steps, widths)

    def _rank_0(self, value: Any) -> Any:
        """The value of the first rank. All ranks run the same forwards, and choose by them."""
        return get_tp_group().broadcast_object(value, src=0)

    def _seconds(self, forward: Callable[..., None], *given: int) -> float:
        started = time.perf_counter()
        forward(*given)
        torch.get_device_module(self._runner.device).synchronize()
        return time.perf_counter() - started

    def _draft(self, batch: int) -> None:
        self._drafter.dry_run(*self._requests(batch))

    def _verify(self, batch: int, width: int) -> None:
        rows, seq_lens, seq_lens_cpu = self._requests(batch)
        dummy = rows.new_zeros(batch, width)
        block = Block(dummy, block_positions(seq_lens, width), dummy)
        forward = VerifyInput(block).forward_batch(rows, seq_lens, seq_lens_cpu)
        output = self._verifier.dry_run(forward, width)
        slots = torch.ones_like(forward.out_cache_loc)  # any slot; no request uses it
        self._context_kv.write(output.hidden_states, forward.positions, slots)

    def _requests(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows and lengths of dummy requests: [B] int64 each, the last one on the host."""
        seq_lens_cpu = torch.full((batch,), self._length)
        rows = torch.arange(batch, device=self._runner.device)
        return rows, seq_lens_cpu.to(rows.device), seq_lens_cpu


def _shown(batches: Sequence[int], widths: Sequence[int], seconds: Array) -> str:
    """A table of times in ms. seconds: [batches, 1 + widths], the draft first."""
    head = ["requests", "draft", *(f"verify {width}" for width in widths)]
    lines = [head]
    for batch, times in zip(batches, seconds * 1000, strict=True):
        lines.append([str(batch), *(f"{each:.1f}" for each in times)])
    return "\n".join("".join(cell.rjust(10) for cell in line) for line in lines)
