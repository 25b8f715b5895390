"""Requests of SGLang that end in any of several ways, for hypothesis."""

from __future__ import annotations

from inspect import unwrap
from typing import Any

from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

update_finish_state = unwrap(Req.update_finish_state)  # SGLang's own; the plugin may be loaded
TOKENS = st.integers(0, 5)
SAMPLING = st.fixed_dictionaries(
    {
        "max_new_tokens": st.integers(1, 12),
        "stop_token_ids": st.none() | st.lists(TOKENS, min_size=1, max_size=2),
        "ignore_eos": st.booleans(),
    }
)


def request(sampling: dict[str, Any], ends: set[int], first: int) -> Req:
    """A request that has its first token from a prefill."""
    params = SamplingParams(**sampling)
    params.normalize(None)
    req = Req("r", "", [1], params, vocab_size=6, eos_token_ids=ends)
    req.output_ids.append(first)
    update_finish_state(req)
    return req
