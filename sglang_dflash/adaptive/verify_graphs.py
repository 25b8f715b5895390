"""The target's attention backend and graphs, a pair for each verify width."""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_dflash.seam.patched import temporarily


class VerifyGraphs:
    """Switches the target between verify widths. SGLang makes a backend and graphs for one width.

    A prefill runs on any pair.
    """

    def __init__(self, runner: ModelRunner, widths: Sequence[int], ragged: bool) -> None:
        """ragged: there is one attention backend, which serves all widths without graphs."""
        self._runner, self._widths, self._ragged = runner, widths, ragged
        self.capture()

    def capture(self) -> None:
        """Make the pairs of all widths except the whole block's, which the runner already has."""
        runner, args, graphs = self._runner, self._runner.server_args, self._runner.graph_runner
        block_size = args.speculative_num_draft_tokens
        self._pairs = {block_size: (runner.attn_backend, graphs)}
        if self._ragged:
            return
        for width in set(self._widths) - {block_size}:
            with temporarily(args, speculative_num_draft_tokens=width):  # both are made for it
                backend = runner._get_attention_backend()
                captured = graphs and type(graphs)(runner, attn_backend=backend)
            self._pairs[width] = backend, captured

    def use_whole(self) -> None:
        self.use(self._runner.server_args.speculative_num_draft_tokens)

    def use(self, width: int) -> None:
        """Verify this width from now on."""
        if not self._ragged:
            self._runner.attn_backend, self._runner.graph_runner = self._pairs[width]
