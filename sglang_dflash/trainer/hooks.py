"""Hooks on SGLang's updates of weights, by which the draft gets its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from sglang.srt.managers.io_struct import (
    UpdateWeightFromDiskReqInput,
    UpdateWeightFromDiskReqOutput,
)

from sglang_dflash.errors import Refusal, shown
from sglang_dflash.seam.patched import temporarily
from sglang_dflash.trainer.new_weights import Answer

logger = logging.getLogger(__name__)

SELECTOR = "selector"  # in the body of a call; some calls of newer releases have this field
FOLDER = "draft_folder"  # in `manifest` of a call, a field that SGLang makes no use of
NOT_FLUSHED = (
    "The draft has the new weights, but the cache was not flushed, because requests are running or "
    "waiting."
)


async def asked_model(request: Any, default: str, *others: str) -> str:
    """The model that the body of a call selects. Raises `Refusal`.

    request: FastAPI's, whose body is parsed already; None: `sglang.Engine` calls. others: the
    values that are allowed besides the default.
    """
    if request is None:
        return default
    selector = (await request.json()).get(SELECTOR, default)
    if selector not in (default, *others):
        raise Refusal(
            f"{SELECTOR} is {shown(selector)}.", f"It must be {' or '.join((default, *others))}."
        )
    return str(selector)


async def choose_folder(
    original: Callable[..., Any],
    manager: Any,
    obj: UpdateWeightFromDiskReqInput,
    request: Any = None,
) -> Any:
    """AROUND `TokenizerManager.update_weights_from_disk`: a field `selector` names the model."""
    obj.manifest = {k: v for k, v in (obj.manifest or {}).items() if k != FOLDER} or None
    if await asked_model(request, "target", "draft") == "draft":
        if obj.load_format not in (None, "auto", "safetensors"):
            raise Refusal(
                f"load_format is {shown(obj.load_format)}.", "A draft is read from safetensors."
            )
        obj.manifest, obj.load_format = {FOLDER: obj.model_path}, None
    return await original(manager, obj, request)


async def keep_name(
    original: Callable[..., Any], manager: Any, obj: UpdateWeightFromDiskReqInput
) -> Any:
    """AROUND `TokenizerManager._wait_for_model_update_from_disk`: a draft is not the model.

    SGLang takes the path of the last weights for that of the target, and for the model's name.
    """
    if FOLDER not in (obj.manifest or {}):
        return await original(manager, obj)
    obj.model_path = manager.model_path
    with temporarily(manager, served_model_name=manager.served_model_name):
        return await original(manager, obj)


def update_from_disk(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """AROUND `SchedulerWeightUpdaterManager.update_weights_from_disk`: the draft's come to it."""
    path = (request.manifest or {}).get(FOLDER)
    if path is None:
        return original(updater, request)
    new_weights = updater.tp_worker.model_runner.dflash_new_weights
    with updater._observe_weight_load("disk"):
        success, message = new_weights.from_folder(path)
    if success and hasattr(updater, "record_weight_version_after_update"):  # since 0.5.23
        updater.record_weight_version_after_update(request.weight_version)
    flush = success and request.flush_cache
    if flush and not updater.flush_cache(empty_cache=request.torch_empty_cache):
        success, message = False, NOT_FLUSHED
    if not success:
        logger.error(message)
    return UpdateWeightFromDiskReqOutput(success=success, message=message, num_paused_requests=0)


async def choose_model(
    original: Callable[..., Any], manager: Any, obj: Any, request: Any = None
) -> Any:
    """AROUND `TokenizerControlMixin.update_weights_from_tensor` and `.._from_distributed`.

    The field `selector` is SGLang's since 0.5.23. Before, a body may have it, too.
    """
    selector = getattr(obj, SELECTOR, None)
    if selector is None:
        selector = await asked_model(request, "all", "target", "draft")
        obj.dflash_selector = selector
    if selector == "draft" and obj.load_format not in (None, "flattened_bucket"):
        raise Refusal(
            f"load_format is {shown(obj.load_format)}, by which no draft can be checked.",
            "Leave it out, or give flattened_bucket.",
        )
    return await original(manager, obj, request)


def divide(original: Callable[..., Answer], updater: Any, *args: Any, **kwargs: Any) -> Answer:
    """AROUND what loads sent tensors into the target: those of the draft are taken out.

    updater: SGLang's worker, or since 0.5.23 its updater of a model, which may be the draft.
    """
    get_runner = getattr(updater, "get_model_runner", lambda: updater.model_runner)
    new_weights = getattr(get_runner(), "dflash_new_weights", None)
    if new_weights is None:
        return original(updater, *args, **kwargs)
    alone = bool(args) and getattr(args[0], "dflash_selector", None) == "draft"
    update = partial(original, updater, *args, **kwargs)
    answer: Answer = new_weights.out_of(get_runner().model, alone, update)
    return answer
