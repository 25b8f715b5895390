"""Requests that are refused late or aborted early leave nothing behind.

SGLang keeps the state of each request from its arrival to its last token. It also keeps the state
of a request that it refuses in between, as one whose prompt is too long. Then the id is taken for
ever, a server that is asked to end waits for the request, and so does an adapter that is to be
unloaded. SGLang also leaks the adapter reference of a request that is aborted while it is queued.
This module releases each reference once, as SGLang 0.5.23 does itself.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from copy import copy
from typing import Any


async def forget_unsent(
    original: Any, manager: Any, obj: Any, *args: Any, **kwargs: Any
) -> AsyncIterator[Any]:
    """AROUND `TokenizerManager.generate_request`, which is hooked to check a request first."""
    answers = original(manager, obj, *args, **kwargs)  # checked, so an id is text
    try:
        async with aclosing(answers):
            async for answer in answers:
                yield answer
    finally:
        await _forget(manager, obj)


def add_prefixes(manager: Any, obj: Any) -> None:
    """BEFORE `TokenizerManager._resolve_lora_path`, which counts the requests that use an adapter.

    For `n` answers to a prompt, SGLang sends a request for the prompt alone before them. It gives
    back a use when this one ends, and has counted none. So the list gets an entry for it.
    """
    if getattr(obj, "parallel_sample_num", 1) > 1:  # one of an embedding has none
        obj.lora_path = obj.lora_path + obj.lora_path[: obj.batch_size]


def release_aborted(manager: Any, aborted: Any) -> None:
    """BEFORE `TokenizerManager._handle_abort_req`: SGLang forgets the request and keeps the use.

    The scheduler aborts a request like this that waits in its queue.
    """
    state = manager.rid_to_state.get(aborted.rid)
    if state is not None and state.obj.lora_id:
        task = asyncio.create_task(manager.lora_registry.release(state.obj.lora_id))
        manager.asyncio_tasks.add(task)  # so that it is not collected
        task.add_done_callback(manager.asyncio_tasks.discard)


async def release_once(original: Any, manager: Any, out: Any, state: Any, stream: bool) -> Any:
    """AROUND `TokenizerManager._handle_abort_finish_reason`, which releases an adapter again."""
    if state.obj.lora_path:
        state = copy(state)
        state.obj = copy(state.obj)
        state.obj.lora_path = None
    return await original(manager, out, state, stream)


def no_wait_for_core_dumps(manager: Any, *_: Any, **__: Any) -> None:
    """BEFORE `TokenizerManager.dump_requests_before_crash`: a server whose child died ends soon.

    SGLang waits a minute for core dumps of the GPU. CUDA writes them only if this variable is 1.
    With --crash-dump-folder, SGLang has set it itself, on a CPU, too: nobody asked for it.
    """
    dumped = os.environ.get("CUDA_ENABLE_USER_TRIGGERED_COREDUMP") == "1"
    asked = dumped and not manager.crash_dump_folder
    if not asked:
        os.environ.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "0")


async def _forget(manager: Any, obj: Any) -> None:
    """Forget the requests of `obj` that SGLang knows and has not sent."""
    own = [obj, *vars(obj).get("_sub_obj_cache", {}).values()]
    uses: list[str] = []
    for i, rid in enumerate(obj.rid if isinstance(obj.rid, list) else [obj.rid]):
        state = manager.rid_to_state.get(rid)
        # Another client's request may have this id.
        if state is None or not any(state.obj is request for request in own):
            continue
        answers = getattr(obj, "parallel_sample_num", 1)
        sent = bool(state.time_stats.api_server_dispatch_finish_time)
        if answers == 1 and sent:
            continue
        # Of several answers to a prompt, each is sent with an id of its own.
        del manager.rid_to_state[rid]
        if i < obj.batch_size and state.obj.lora_id is not None:
            count = 1 if answers == 1 else 1 + answers
            if sent:  # the prompt alone, which gives its use back itself
                count -= 1
            uses += [state.obj.lora_id] * count
    if uses:
        await manager.lora_registry.release(uses)
