"""Custom logit processors: code of a user, whose errors end its request alone."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from torch import Tensor


def wrong_processor(text: str) -> str | None:
    """Why a custom logit processor cannot be made of its text, or None."""
    try:
        made = CustomLogitProcessor.from_str(text)
    except Exception as error:  # noqa: BLE001 - user code must not end the scheduler
        return f"custom_logit_processor cannot be read. {type(error).__name__}: {error}"
    return None if callable(made) else "custom_logit_processor is no function."


def run_custom_processors(logits: Tensor, info: SamplingBatchInfo, reqs: list[Req]) -> None:
    """Let each request's own processor change its logits in place. logits: [B, V].

    SGLang's own processors assert that all requests of a call have the same parameters, so each
    request has its own call.
    """
    for i, req in enumerate(reqs):
        if req.custom_logit_processor is None:
            continue
        processor = info.custom_logit_processor[hash(req.custom_logit_processor)]
        # SGLang 0.5.13 keeps a pair, whose other half is a mask of requests.
        processor = processor[0] if isinstance(processor, tuple) else processor.processor
        error = _run(processor, logits[i], info.custom_params[i])
        if error is not None:
            req.to_finish = FINISH_ABORT(error, HTTPStatus.BAD_REQUEST)


def _run(processor: Any, logits: Tensor, params: Any) -> str | None:
    """Change the logits of one request, [V], in place. Returns the error that ends the request."""
    try:
        changed = processor(logits[None].clone(), [params])
        if changed.shape != (1, *logits.shape):
            raise ValueError(f"it returned logits of shape {tuple(changed.shape)}")
        logits.copy_(changed[0])
    except Exception as error:  # noqa: BLE001 - user code must not end the scheduler
        return f"The custom logit processor failed: {error!r}"[:500]
    return None
