"""Logprobs of prompts, where SGLang takes those of another place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dflash.seam.patched import temporarily


def own_prompt(original: Callable[..., int], *args: Any, logprob_pt: int, **given: Any) -> int:
    """AROUND `_apply_prefill_logprobs` and that of a chunk: a prompt's values begin behind others'.

    SGLang does not count those of requests that were retracted while their prefill ran.
    """
    lens, starts = given["extend_input_len_per_req"], given["extend_logprob_start_len_per_req"]
    before = slice(given["i"])
    begin = sum(lens[before]) - sum(starts[before])
    return original(*args, logprob_pt=begin, **given)


def no_token(original: Callable[..., None], processor: Any, i: int, req: Any, *args: Any) -> None:
    """AROUND `add_logprob_return_values`: a request of no token has no logprob of one.

    Without speculation, SGLang draws none for it.
    """
    output = args[-1]
    if req.sampling_params.max_new_tokens == 0:
        with temporarily(output, next_token_logprobs=None):
            original(processor, i, req, *args)
    else:
        original(processor, i, req, *args)
