"""Prompts that consist of embeddings."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult


def among_their_kind(original: Any, adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND `PrefillAdder.add_one_req`: a prefill has embeddings alone, or none.

    SGLang hands the embeddings of those requests that have some to the target as the whole batch's.
    A request of the other kind, and those behind it, wait for the next prefill.
    """
    first = next(iter(adder.can_run_list), req)
    if (first.input_embeds is None) != (req.input_embeds is None):
        return AddReqResult.OTHER
    return original(adder, req, *args, **kwargs)
