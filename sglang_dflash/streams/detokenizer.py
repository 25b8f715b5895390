"""SGLang's detokenizer, for chunks of several tokens.

A chunk can end inside a character. SGLang then sends the text before it, as far as it looks
finished. If the next chunk ends inside a character, too, less may look finished than was sent.
SGLang then takes the shorter text for what it has sent, and sends the rest twice. With one token a
chunk, a character is whole before the next one begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.detokenizer_manager import DetokenizerManager, run_detokenizer_process


def launch(
    original: Callable[..., Any],
    engine: Any,
    server_args: Any,
    port_args: Any,
    run_detokenizer_process_func: Callable[..., Any],
) -> Any:
    """AROUND `Engine._launch_detokenizer_subprocesses`, whose processes load no plugins."""
    run = run_detokenizer_process_func
    if run is run_detokenizer_process:
        run = run_detokenizer
    return original(engine, server_args, port_args, run_detokenizer_process_func=run)


def run_detokenizer(server_args: Any, port_args: Any) -> None:
    """The detokenizer's process."""
    run_detokenizer_process(server_args, port_args, Detokenizer)


class Detokenizer(DetokenizerManager):
    """A detokenizer that sends each character once."""

    def _decode_batch_token_id_output(self, recv_obj: Any) -> list[str]:
        sent = {}
        for rid in recv_obj.rids:
            if rid in self.decode_status:
                sent[rid] = self.decode_status[rid].sent_offset
        texts: list[str] = super()._decode_batch_token_id_output(recv_obj)
        for rid, offset in sent.items():
            if rid in self.decode_status:  # it goes on
                status = self.decode_status[rid]
                status.sent_offset = max(status.sent_offset, offset)
        return texts
