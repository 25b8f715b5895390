"""The last steps of a request, for a client that asks to watch them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

WATCHED = "spec_steps"  # a key of `custom_params`, and of an answer's `meta_info`
KEPT = 64  # steps, in every chunk of a stream


@dataclass(frozen=True)
class Step:
    """One step of one request."""

    drafts: list[int]  # token ids of the whole block, by position from 1
    num_verified: int  # the first drafts, which the target verified
    num_accepted: int  # the first drafts, which the target accepted
    num_committed: int  # tokens of the answer: the accepted drafts, then the target's own token
    place: int  # index of the first of them in the answer
    num_requests: int  # of the batch
    seconds: float  # of a monotonic clock, at the commit


def new_log() -> deque[Step]:
    return deque(maxlen=KEPT)


def is_watched(req: Any) -> bool:
    """Whether the client of a request asked for its steps. req: SGLang's `Req`.

    They are sent with logprobs only (`hooks.watched_steps`).
    """
    params = req.sampling_params.custom_params
    return bool(req.return_logprob and isinstance(params, dict) and params.get(WATCHED))
