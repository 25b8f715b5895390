"""Requests that end before they are sent to the scheduler leave nothing behind.

SGLang keeps the state of each request from its arrival to its last token. It forgets none of a
request that it refuses in between, as a prompt that is too long. Then the id is taken for ever, a
server that is asked to end waits for the request, and so does an adapter that is to be unloaded.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from sglang_dflash.algorithm import is_dflash


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
        if is_dflash(manager.server_args):
            await _forget(manager, obj)


def count_prefixes(manager: Any, obj: Any) -> None:
    """BEFORE `TokenizerManager._resolve_lora_path`, which counts the requests that use an adapter.

    For `n` answers to a prompt, SGLang sends a request for the prompt alone before them. It takes
    away a use when this one ends, and has counted none.
    """
    if is_dflash(manager.server_args) and obj.parallel_sample_num > 1:
        obj.lora_path = obj.lora_path + obj.lora_path[: obj.batch_size]


async def _forget(manager: Any, obj: Any) -> None:
    """Forget the requests of `obj` that SGLang knows and has not sent."""
    own = [obj, *vars(obj).get("_sub_obj_cache", {}).values()]
    for i, rid in enumerate(obj.rid if isinstance(obj.rid, list) else [obj.rid]):
        state, answers = manager.rid_to_state.get(rid), obj.parallel_sample_num
        # Another client's request may have this id.
        if state is None or not any(state.obj is request for request in own):
            continue
        sent = bool(state.time_stats.api_server_dispatch_finish_time)
        if answers == 1 and sent:
            continue
        # Of several answers to a prompt, each is sent with an id of its own.
        del manager.rid_to_state[rid]
        if i < obj.batch_size and state.obj.lora_id is not None:
            uses = 1 if answers == 1 else 1 + answers
            for _ in range(uses - sent):
                await manager.lora_registry.release(state.obj.lora_id)
