"""Hooks on SGLang's updates of weights, by which the draft gets its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.io_struct import (
    UpdateWeightFromDiskReqInput,
    UpdateWeightFromDiskReqOutput,
)

from sglang_dflash.errors import Refusal, shown

logger = logging.getLogger(__name__)

PREFIX = "draft."  # of the draft's tensors among the target's, as `/weights_checker` has it
SELECTOR = "selector"  # in the body of a call, as other calls of newer releases have it
FOLDER = "draft_folder"  # in a manifest
NOT_FLUSHED = (
    "The draft has the new weights, but the cache was not flushed, because requests are running or "
    "waiting."
)


async def choose_model(
    original: Callable[..., Any],
    manager: Any,
    obj: UpdateWeightFromDiskReqInput,
    request: Any = None,
) -> Any:
    """AROUND `TokenizerManager.update_weights_from_disk`: a field `selector` names the model.

    request: FastAPI's, whose body SGLang has read into `obj`; its class has no such field. So the
    scheduler gets it in `manifest`, of which SGLang makes no use. SGLang keeps the path of the last
    weights as the target's and as the model's name, so for the draft this is the target's again.
    """
    selector = "target"
    if request is not None:
        selector = (await request.json()).get(SELECTOR, selector)
    if selector == "target":
        return await original(manager, obj, request)
    if selector != "draft":
        raise Refusal(
            f"{SELECTOR} is {shown(selector)}.", "It must be target or draft: a path is of one."
        )
    obj.manifest = {FOLDER: obj.model_path}
    obj.model_path = manager.model_path
    obj.load_format = None
    name = manager.served_model_name
    try:
        return await original(manager, obj, request)
    finally:
        manager.served_model_name = name


def update_from_disk(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """AROUND `SchedulerWeightUpdaterManager.update_weights_from_disk`: the draft's come to it."""
    path = (request.manifest or {}).get(FOLDER)
    if path is None:
        return original(updater, request)
    with updater._observe_weight_load("disk"):
        success, message = updater.tp_worker.dflash_new_weights.from_folder(path)
    flush = success and request.flush_cache
    if flush and not updater.flush_cache(empty_cache=request.torch_empty_cache):
        success, message = False, NOT_FLUSHED
    if not success:
        logger.error(message)
    return UpdateWeightFromDiskReqOutput(success=success, message=message, num_paused_requests=0)


def divide(original: Callable[..., Any], worker: Any, request: Any) -> Any:
    """AROUND `BaseTpWorker.update_weights_from_tensor` and `update_weights_from_distributed`."""
    model = worker.model_runner.model
    return worker.dflash_new_weights.out_of(model, PREFIX, original, worker, request)
