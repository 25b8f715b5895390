"""Requests that steer a server: those that crash SGLang's scheduler are refused.

`check_control` runs when a request leaves the tokenizer's process. The hooks on the scheduler know
its state. They add a refusal to SGLang's answer, and `check_control` raises it.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.configs.load_config import LoadFormat
from sglang.srt.constants import GPU_MEMORY_ALL_TYPES
from sglang.srt.managers.io_struct import (
    BaseReq,
    ExpertDistributionReq,
    InitWeightsSendGroupForRemoteInstanceReqInput,
    PauseGenerationReqInput,
    ProfileReq,
    ProfileReqOutput,
    ProfileReqType,
    ReleaseMemoryOccupationReqInput,
    ReleaseMemoryOccupationReqOutput,
    ResumeMemoryOccupationReqInput,
    ResumeMemoryOccupationReqOutput,
    SendWeightsToRemoteInstanceReqInput,
    SetInternalStateReq,
    SlowDownReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromDistributedReqOutput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightsFromTensorReqOutput,
)

from sglang_dflash.errors import WRONG_WEIGHTS, Refusal, shown
from sglang_dflash.seam import release
from sglang_dflash_guard.values import UNSET, Fields, Int32, Number

LONGEST_PART = 100  # characters; the rest of a trace's name follows
ACTIVITIES = "CPU", "GPU", "MEM", "CUDA_PROFILER"  # of a profile; a CPU has the first two
CALLS: WeakKeyDictionary[Any, asyncio.Lock] = WeakKeyDictionary()  # held during a call
OF_MEMORY = ReleaseMemoryOccupationReqOutput, ResumeMemoryOccupationReqOutput
WRITABLE_FOLDER = "Name a folder that the server can write."


class State(Fields):
    """What SGLang lets a client set while a server runs."""

    pp_max_micro_batch_size: Int32 = UNSET
    speculative_accept_threshold_single: Number = UNSET
    speculative_accept_threshold_acc: Number = UNSET


async def check_control(original: Any, communicator: Any, obj: Any) -> Any:
    """AROUND `FanOutCommunicator.__call__`: refuse before the scheduler sees it, or as it says.

    One call at a time: SGLang wakes the next one that waits, and asserts that no other has come
    between. Callers that watch share one answer, and never wait for each other.
    """
    check = CONTROL_CHECKS.get(type(obj))
    if check is not None:
        check(obj)
    if communicator._mode == "watching":
        results = await original(communicator, obj)
    else:
        async with CALLS.setdefault(communicator, asyncio.Lock()):
            results = await original(communicator, obj)
    for result in results:
        if isinstance(result, OF_MEMORY) and result.rid:
            raise Refusal(*result.rid.split("\n"))
        if isinstance(result, ProfileReqOutput) and not result.success:
            raise Refusal(result.message, "Then ask again.")  # it names the request to send first
    return results


def is_health_check(original: Any, request: Any) -> bool:
    """AROUND `is_health_check_generate_req`: only a request for text is one, whatever its id.

    SGLang asks this about every message, and takes the id of any message for text.
    """
    return isinstance(getattr(request, "rid", None), str) and bool(original(request))


def answer_health_checks(scheduler: Any, *_: Any, **__: Any) -> None:
    """BEFORE `Scheduler.on_idle`: some came with the last step, and wait for the end of a next one.

    SGLang 0.5.23 answers them here, too.
    """
    while scheduler.return_health_check_ipcs:
        scheduler.maybe_send_health_check_signal()


def answer_aborted(_: Any, output: Any, asked: Any = None) -> None:
    """BEFORE `SenderWrapper.send_output`: to the HTTP process of a request that the queue drops.

    SGLang finds it for answers to other messages alone. SGLang 0.5.23 finds it here, too.
    """
    if isinstance(output, BaseReq) and output.http_worker_ipc is None:
        output.http_worker_ipc = getattr(asked, "http_worker_ipc", None)


def drop_finished(scheduler: Any, *_: Any, **__: Any) -> None:
    """BEFORE `Scheduler.flush_cache`: an answer is sent before its request leaves the batch.

    A client that updates the weights then ends SGLang's scheduler, which asserts that the cache is
    flushed.
    """
    for batch in (scheduler.running_batch, scheduler.last_batch):
        if batch is not None and batch.reqs and all(req.finished() for req in batch.reqs):
            batch.filter_batch()


def release_memory(original: Any, updater: Any, request: ReleaseMemoryOccupationReqInput) -> Any:
    """AROUND `SchedulerWeightUpdaterManager.release_memory_occupation`: SGLang asserts this."""
    paused = getattr(getattr(updater, "scheduler", None), "_engine_paused", False)
    if updater.is_fully_idle(ignore_waiting=True) if paused else updater.is_fully_idle():
        # A block that is drafted ahead may still run.
        torch.get_device_module(updater.tp_worker.model_runner.device).synchronize()
        return original(updater, request)
    return _refused(
        ReleaseMemoryOccupationReqOutput,
        "Requests are running.",
        "Wait until no request runs, and ask again.",
    )


def resume_memory(original: Any, updater: Any, request: ResumeMemoryOccupationReqInput) -> Any:
    """AROUND `SchedulerWeightUpdaterManager.resume_memory_occupation`: a KeyError there."""
    wanted = set(request.tags or GPU_MEMORY_ALL_TYPES)
    if wanted <= updater.offload_tags:
        return original(updater, request)
    missing = ", ".join(sorted(wanted - updater.offload_tags))
    return _refused(
        ResumeMemoryOccupationReqOutput,
        f"This was not released: {missing}.",
        "Name only tags that were released.",
    )


def update_from_tensor(
    original: Any, updater: Any, request: UpdateWeightsFromTensorReqInput
) -> Any:
    """AROUND `SchedulerWeightUpdaterManager.update_weights_from_tensor`: answer in any case.

    SGLang catches the errors of weights that come from a group of processes, and not of these.
    """
    try:
        return original(updater, request)
    except WRONG_WEIGHTS as error:
        torch.distributed.barrier(group=updater.tp_cpu_group)  # the other ranks wait in it
        return UpdateWeightsFromTensorReqOutput(success=False, message=_partly_changed(error))


def update_from_disk(original: Any, updater: Any, *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """AROUND `WeightUpdater.update_weights_from_disk`, which has forgotten the path of the old."""
    try:
        done: tuple[bool, str] = original(updater, *args, **kwargs)
    except WRONG_WEIGHTS as error:
        return False, _partly_changed(error)
    return done


def update_from_group(
    original: Any, updater: Any, request: UpdateWeightsFromDistributedReqInput
) -> Any:
    """AROUND `SchedulerWeightUpdaterManager.update_weights_from_distributed`, which asserts."""
    groups = updater.tp_worker.model_runner._model_update_group
    if request.group_name in groups:
        try:
            return original(updater, request)
        except AssertionError as error:  # of the flush
            return UpdateWeightsFromDistributedReqOutput(False, _partly_changed(error))
    why = f"There is no group {shown(request.group_name)}. Call /init_weights_update_group first."
    return UpdateWeightsFromDistributedReqOutput(False, why)


def send_weights(original: Any, runner: Any, address: str, ports: str, group: str) -> Any:
    """AROUND `ModelRunner.send_weights_to_remote_instance`: a missing group is a KeyError there."""
    port = ports.split(",")[runner.tp_rank]
    name = f"{group}_{port}_{runner.tp_rank}"
    if name in runner._weights_send_group:
        return original(runner, address, ports, group)
    why = f"There is no group {shown(name)}."
    return False, f"{why} Call /init_weights_send_group_for_remote_instance first."


def check_weights(manager: Any, obj: UpdateWeightFromDiskReqInput, *_: Any) -> None:
    """BEFORE `TokenizerManager.update_weights_from_disk`: its message takes a way of its own."""
    known = [form.value for form in LoadFormat]
    given = obj.load_format
    if given is not None and given not in known:
        raise Refusal(f"load_format is {shown(given)}.", f"It must be one of {', '.join(known)}.")


def check_pause(manager: Any, obj: PauseGenerationReqInput, *_: Any) -> None:
    """BEFORE `pause_generation` of each tokenizer manager: retracted requests are prefilled again.

    A decode server would wait in vain for their KV.
    """
    if obj.mode == "retract" and manager.server_args.disaggregation_mode == "decode":
        raise Refusal(
            "mode is 'retract', and a decode server cannot prefill.", "Give in_place or abort."
        )


def _partly_changed(error: Exception) -> str:
    if str(error).startswith("Cache flush failed"):
        return f"{error}: requests are running or waiting. All weights are new."
    return f"{type(error).__name__}: {error}. Weights may be partly changed: load them again."


def _refused(kind: Callable[..., Any], what: str, fix: str) -> Any:
    """The answer of a scheduler, with the parts of a `Refusal` that `check_control` raises.

    Such an answer has no field but an id, which SGLang leaves empty.
    """
    return kind(rid=f"{what}\n{fix}")


def _experts(_: ExpertDistributionReq) -> None:
    if release.server_args().expert_distribution_recorder_mode is None:
        raise Refusal(
            "This server records no distribution of experts.",
            "Start it with --expert-distribution-recorder-mode.",
        )


def _memory(obj: Any) -> None:
    for tag in obj.tags or ():
        if tag not in GPU_MEMORY_ALL_TYPES:
            raise Refusal(
                f"tags has {shown(tag)}.", f"It must be one of {', '.join(GPU_MEMORY_ALL_TYPES)}."
            )


def _profile(obj: ProfileReq) -> None:
    """A scheduler writes the trace long after it has answered."""
    kind = obj.type if release.has_own_scheduler_step() else obj.req_type
    if kind is not ProfileReqType.START_PROFILE:
        return
    served = ACTIVITIES[: 2 if release.server_args().device == "cpu" else None]
    for activity in obj.activities or ():
        if activity not in served:
            raise Refusal(
                f"activities has {shown(activity)}.", f"It must be one of {', '.join(served)}."
            )
    for name in ("profile_prefix", "profile_id"):
        part = getattr(obj, name) or ""
        if len(part) > LONGEST_PART or os.path.basename(part) != part or "\0" in part:
            raise Refusal(
                f"{name} is {shown(part)}.",
                f"It must be a part of a file's name of at most {LONGEST_PART} characters.",
            )
    if obj.output_dir is not None:
        _make_folder(obj.output_dir)


def _make_folder(name: str) -> None:
    """Make the folder as SGLang does when it writes the trace."""
    try:
        folder = Path(name).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise Refusal(
            f"output_dir is {shown(name)}, which cannot be made: {error}.", WRITABLE_FOLDER
        ) from None
    if not os.access(folder, os.W_OK):
        raise Refusal(f"output_dir is {shown(name)}, which cannot be written.", WRITABLE_FOLDER)


def _state(obj: SetInternalStateReq) -> None:
    for name, value in obj.server_args.items():
        if name not in State.model_fields:
            settable = ", ".join(State.model_fields)
            raise Refusal(f"server_args has {shown(name)}.", f"It must be one of {settable}.")
        if value is None:
            raise Refusal(f"server_args.{name} is None.", f"It must be {State.expected(name)}.")
    obj.server_args = State.read(obj.server_args, "server_args.{}")


def _sleep(obj: SlowDownReqInput) -> None:
    if obj.forward_sleep_time is not None and not math.isfinite(obj.forward_sleep_time):
        raise Refusal(f"forward_sleep_time is {obj.forward_sleep_time}.", "It must be finite.")


def _ports(
    obj: InitWeightsSendGroupForRemoteInstanceReqInput | SendWeightsToRemoteInstanceReqInput,
) -> None:
    """SGLang asserts this in each scheduler."""
    ranks = release.server_args().tp_size
    if len(obj.ports.split(",")) != ranks:
        raise Refusal(f"ports is {shown(obj.ports)}.", f"Give {ranks} ports, one for each rank.")
    if not obj.group_name:
        raise Refusal("group_name is empty.", "Name the group.")


CONTROL_CHECKS: dict[type, Callable[[Any], None]] = {
    ExpertDistributionReq: _experts,
    InitWeightsSendGroupForRemoteInstanceReqInput: _ports,
    ProfileReq: _profile,
    ReleaseMemoryOccupationReqInput: _memory,
    ResumeMemoryOccupationReqInput: _memory,
    SendWeightsToRemoteInstanceReqInput: _ports,
    SetInternalStateReq: _state,
    SlowDownReqInput: _sleep,
}
