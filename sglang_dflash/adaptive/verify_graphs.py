"""What the target can verify: widths, each with an attention backend and graphs, or any rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from torch import Tensor

from sglang_dflash.method.block import Block
from sglang_dflash.seam.patched import temporarily
from sglang_dflash.step.forward import VerifyInput

MOST_MEASURED = 64  # requests


class WidthGraphs:
    """Switches the target between widths. SGLang makes a backend and graphs for one width."""

    ragged = False
    most_measured = MOST_MEASURED

    def __init__(self, runner: ModelRunner, widths: Sequence[int]) -> None:
        """widths: ascending."""
        self._runner, self._widths = runner, widths
        # What of SGLang is made for one width: owners and names.
        self._made: list[tuple[Any, str]] = [(runner, "attn_backend"), (runner, "graph_runner")]
        if runner.server_args.enable_lora:
            self._made.append((runner.lora_manager.lora_backend, "cuda_graph_batch_info"))
        self.capture()

    def options(self, requests: int) -> list[int]:
        return [requests * width for width in self._widths]

    measured = options

    def capture(self) -> None:
        """Make the parts of all widths except the whole block's, which the runner already has."""
        runner, args, graphs = self._runner, self._runner.server_args, self._runner.graph_runner
        block_size = args.speculative_num_draft_tokens
        self._parts = {block_size: self._now()}
        for width in set(self._widths) - {block_size}:
            with temporarily(args, speculative_num_draft_tokens=width):  # all are made for it
                runner.attn_backend = backend = runner._get_attention_backend()
                runner.graph_runner = graphs and type(graphs)(runner, attn_backend=backend)
            self._parts[width] = self._now()
        self.use_whole()

    def _now(self) -> list[Any]:
        """The parts of the width that the runner has now. Without graphs, LoRA has none."""
        return [getattr(owner, name, None) for owner, name in self._made]

    def use(self, block: Block) -> None:
        self._use(block.width)

    def use_whole(self) -> None:
        self._use(self._runner.server_args.speculative_num_draft_tokens)

    def _use(self, width: int) -> None:
        for (owner, name), part in zip(self._made, self._parts[width], strict=True):
            setattr(owner, name, part)

    def forward_batch(
        self, block: Block, rows: Tensor, seq_lens: Tensor, seq_lens_cpu: Tensor
    ) -> ForwardBatch:
        return VerifyInput(block).forward_batch(rows, seq_lens, seq_lens_cpu)


class NoGraphs:
    """One attention backend serves all that a step may verify, as on a CPU."""

    most_measured = MOST_MEASURED

    def __init__(self, widths: Sequence[int], ragged: bool) -> None:
        """widths: rows a request, their mean if they are ragged, ascending."""
        self._widths, self.ragged = widths, ragged

    def options(self, requests: int) -> list[int]:
        return [requests * width for width in self._widths]

    def measured(self, requests: int) -> list[int]:
        every = self.options(requests)
        return sorted({*every[:2], every[(len(every) - 1) // 2], every[-1]})

    def capture(self) -> None:
        pass

    def use(self, block: Block) -> None:
        pass

    def use_whole(self) -> None:
        pass

    def forward_batch(
        self, block: Block, rows: Tensor, seq_lens: Tensor, seq_lens_cpu: Tensor
    ) -> ForwardBatch:
        return VerifyInput(block).forward_batch(rows, seq_lens, seq_lens_cpu)
