"""Graphs of a verify that are keyed by their rows, whatever the request of each row is."""

from __future__ import annotations

import copy
import logging
import time
from typing import Any

import torch
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunner
from torch import Tensor
from torch.nn import functional as F

from sglang_dflash.method.block import Block
from sglang_dflash.seam.patched import temporarily
from sglang_dflash.step.forward import VerifyInput

logger = logging.getLogger(__name__)


def row_counts(block_size: int, most: int) -> list[int]:
    """Rows of graphs, ascending, below `most`: N times 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    counts = [block_size, 2 * block_size, 3 * block_size]
    while counts[-1] < most:
        counts.append(2 * counts[-2])
    return [count for count in counts if count < most]


class RequestsBackend:
    """The attention backend of graphs whose batch size is a number of rows.

    To SGLang's graph runner, such a graph has a request for each row. The backend sees only as many
    as there can be. Their rows are in `dflash_lens`, which the backend's hooks read, and whose
    values are filled in before a replay.
    """

    def __init__(self, backend: Any, most: int, device: str) -> None:
        """most: requests."""
        self._backend, self._most = backend, most
        self.lens = torch.zeros(most, dtype=torch.int32, device=device)
        chosen = backend
        if isinstance(backend, HybridAttnBackend):
            chosen = backend._select_backend(ForwardMode.TARGET_VERIFY)
        chosen.dflash_lens = self.lens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Of the tokens, only those that a decode step has need room: one of each request."""
        count = min(max_bs, self._most)
        self._backend.init_cuda_graph_state(count, count)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        if in_capture:
            self._spread(forward_batch.batch_size)
        self._backend.init_forward_metadata_out_graph(self._seen(forward_batch), in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        self._backend.init_forward_metadata_in_graph(self._seen(forward_batch))

    def _seen(self, forward_batch: Any) -> Any:
        """The batch of the requests that there can be."""
        if not forward_batch.forward_mode.is_target_verify():
            return forward_batch
        seen = copy.copy(forward_batch)
        seen.batch_size = count = min(forward_batch.batch_size, self._most)
        for name in ("req_pool_indices", "seq_lens", "seq_lens_cpu"):
            setattr(seen, name, getattr(forward_batch, name)[:count])
        return seen

    def _spread(self, rows: int) -> None:
        """A capture's rows are those of the first requests, as equally as they can be."""
        count = min(rows, self._most)
        self.lens.zero_()
        self.lens[:count] = rows // count
        self.lens[: rows % count] += 1


class RowGraphs:
    """The target's own graphs verify whole blocks, and graphs of fewer rows all others."""

    ragged = True

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._block_size = runner.server_args.speculative_num_draft_tokens
        self._cut: tuple[Any, Any] | None = None
        self.capture()

    @property
    def most_measured(self) -> int:
        return self._most

    def options(self, requests: int) -> list[int]:
        whole = requests * self._block_size
        if requests > self._most:
            return [whole]
        return [*(rows for rows in self._counts if requests <= rows < whole), whole]

    measured = options

    def capture(self) -> None:
        """Capture the graphs of fewer rows."""
        runner, args, started = self._runner, self._runner.server_args, time.monotonic()
        self._cut = None  # its memory is free again
        self._whole = runner.attn_backend, runner.graph_runner
        self._most: int = runner.graph_runner.max_bs  # requests
        self._counts = row_counts(self._block_size, self._most * self._block_size)
        free = self._free()
        backend = RequestsBackend(runner._get_attention_backend(), self._most, runner.device)
        # To SGLang these are batch sizes, of which it drops those beyond the rows of this pool.
        compiled = args.torch_compile_max_bs * self._block_size
        with (
            temporarily(args, cuda_graph_bs=list(self._counts), torch_compile_max_bs=compiled),
            temporarily(runner.req_to_token_pool, size=self._counts[-1]),
        ):
            graphs = type(runner.graph_runner)(
                runner, attn_backend=backend, speculative_num_draft_tokens=1
            )
        self._cut = backend, graphs
        logger.info(
            "DFLASH: captured verifies of %s rows in %.1f s. They take %.2f GiB.",
            self._counts,
            time.monotonic() - started,
            (free - self._free()) / 2**30,
        )

    def _free(self) -> int:
        free, _ = torch.get_device_module(self._runner.device).mem_get_info()
        return int(free)

    def use(self, block: Block) -> None:
        if block.ragged is None:
            self.use_whole()
        else:
            assert self._cut is not None
            self._runner.attn_backend, self._runner.graph_runner = self._cut

    def use_whole(self) -> None:
        self._runner.attn_backend, self._runner.graph_runner = self._whole

    def forward_batch(
        self, block: Block, rows: Tensor, seq_lens: Tensor, seq_lens_cpu: Tensor
    ) -> ForwardBatch:
        """A ragged block's batch has empty requests, as many as rows in all."""
        if block.ragged is None:
            return VerifyInput(block).forward_batch(rows, seq_lens, seq_lens_cpu)
        assert self._cut is not None
        backend, graphs = self._cut
        backend.lens.zero_()
        backend.lens[: len(rows)] = block.ragged.lens
        missing, filler = (0, block.rows - len(rows)), graphs.seq_len_fill_value
        return VerifyInput(block).forward_batch(
            F.pad(rows, missing),
            F.pad(seq_lens, missing, value=filler),
            F.pad(seq_lens_cpu, missing, value=filler),
        )
