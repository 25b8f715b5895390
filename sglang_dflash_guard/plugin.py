"""The entry point `dflash_guard` of `sglang.srt.plugins`: it protects a server from its clients.

It is on for servers of DFLASH. SGLANG_DFLASH_GUARD=always protects every server, and `never` none.
DFLASH serves without it. Where SGLang has changed, single hooks are left out, and the log says so.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import Any

from sglang_dflash.errors import Refusal
from sglang_dflash.seam import release
from sglang_dflash.seam.flags import serves_dflash
from sglang_dflash.seam.hook import Hook, always, missing, register
from sglang_dflash.seam.http import prepare

logger = logging.getLogger(__name__)

VARIABLE = "SGLANG_DFLASH_GUARD"
ALWAYS, WITH_DFLASH, NEVER = MODES = "always", "dflash", "never"


def dflash_guard() -> None:
    """Protect servers from requests that SGLang cannot serve."""
    register([MODE, *HOOKS], "sglang_dflash_guard")
    prepare(guards, _begin)


def guards(*args: Any, **kwargs: Any) -> bool:
    """Whether the guard protects the server of a call in SGLang: the gate of all its hooks."""
    mode = _mode()
    return mode == ALWAYS or (mode == WITH_DFLASH and serves_dflash(*args, **kwargs))


def check_mode(*_: Any, **__: Any) -> None:
    """BEFORE `ServerArgs` are resolved: refuse a wrong mode before anything is loaded."""
    _mode()


def _mode() -> str:
    mode = os.environ.get(VARIABLE) or WITH_DFLASH
    if mode not in MODES:
        raise Refusal(f"{VARIABLE} is {mode}.", f"Set it to {', '.join(MODES)}, or unset it.")
    return mode


def _begin(app: Any) -> None:
    """Check HTTP bodies."""
    try:
        from sglang_dflash_guard.middleware import BodyChecks  # it needs SGLang's application
    except Exception as error:  # noqa: BLE001, SGLang has changed in whatever way
        logger.warning("The guard cannot check HTTP bodies (%s).", error)
    else:
        app.add_middleware(BodyChecks)
    say_what_lacks()


def say_what_lacks(*_: Any, **__: Any) -> None:
    """AFTER `TokenizerManager.__init__`, which `sglang.Engine` calls too, and before HTTP."""
    _say_once()


@cache
def _say_once() -> None:
    lacking = missing(hook.target for hook in HOOKS)
    for hook in HOOKS:
        if hook.target in lacking:
            logger.warning("The guard lacks a hook (%s). So %s.", lacking[hook.target], hook.why)


# Target, kind, function of ours, and the reason why it must exist.
ROWS = (
    (
        "managers.tokenizer_manager.TokenizerManager.__init__",
        "AFTER",
        "plugin:say_what_lacks",
        "nobody hears of hooks that are missing under sglang.Engine",
    ),
    (
        "lora.lora_manager.LoRAManager.load_lora_weights",
        "AFTER",
        "lora_weights:check_weights",
        "an adapter whose weights do not fit crashes SGLang's scheduler at its first request",
    ),
    (
        "lora.lora_manager.LoRAManager.load_lora_weights_from_tensors",
        "AFTER",
        "lora_weights:check_weights",
        "so does an adapter that comes with a request",
    ),
    (
        "managers.tp_worker.BaseTpWorker.load_lora_adapter",
        "AROUND",
        "lora_weights:load_on_all_ranks",
        "if one rank cannot load an adapter, the others serve it",
    ),
    (
        "managers.tp_worker.BaseTpWorker.load_lora_adapter_from_tensors",
        "AROUND",
        "lora_weights:load_on_all_ranks",
        "tensors that cannot be read crash SGLang's scheduler, also on one rank of several",
    ),
    (
        "lora.lora_manager.LoRAManager.init_memory_pool",
        "AFTER",
        "lora_weights:check_all_weights",
        "the adapters that a server starts with are loaded before their buffers exist",
    ),
    (
        "managers.schedule_policy.PrefillAdder.add_one_req",
        "AROUND",
        "embeddings:among_their_kind",
        "prompts of embeddings and of tokens in one prefill crash SGLang's scheduler",
    ),
    (
        "entrypoints.ollama.serving.OllamaServing.handle_chat",
        "AROUND",
        "other_apis:refuse_ollama",
        "SGLang answers its own refusals with HTTP 500 here",
    ),
    (
        "entrypoints.ollama.serving.OllamaServing.handle_generate",
        "AROUND",
        "other_apis:refuse_ollama",
        "SGLang answers its own refusals with HTTP 500 here, too",
    ),
    (
        "entrypoints.ollama.serving.OllamaServing._stream_chat_response",
        "AROUND",
        "streamed_text:of_ollama",
        "SGLang drops the text of the last chunk, here up to a block",
    ),
    (
        "entrypoints.ollama.serving.OllamaServing._stream_generate_response",
        "AROUND",
        "streamed_text:of_ollama",
        "SGLang drops the text of the last chunk here, too",
    ),
    (
        "entrypoints.openai.serving_responses.OpenAIServingResponses.responses_stream_generator",
        "AROUND",
        "other_apis:end_with_an_error",
        "SGLang breaks the stream off",
    ),
    (
        "managers.communicator.FanOutCommunicator.__call__",
        "AROUND",
        "control:check_control",
        "some requests that steer a server crash SGLang's scheduler",
    ),
    (
        "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
        ".release_memory_occupation",
        "AROUND",
        "control:release_memory",
        "SGLang's scheduler asserts that no request runs",
    ),
    (
        "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
        ".resume_memory_occupation",
        "AROUND",
        "control:resume_memory",
        "memory that was not released crashes SGLang's scheduler",
    ),
    (
        "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
        ".update_weights_from_tensor",
        "AROUND",
        "control:update_from_tensor",
        "tensors that SGLang cannot read crash its scheduler",
    ),
    (
        "managers.tokenizer_manager.TokenizerManager.dump_requests_before_crash",
        "BEFORE",
        "lifecycle:no_wait_for_core_dumps",
        "SGLang waits a minute for core dumps that CUDA does not write",
    ),
    (
        "session.session_controller.Session.create_req",
        "BEFORE",
        "sessions:begin_anew",
        "a request that replaces a session's history crashes SGLang's scheduler",
    ),
    (
        "session.session_controller.SessionReqNode.clear",
        "AROUND",
        "sessions:clear",
        "an id that a session has twice crashes SGLang's scheduler",
    ),
    (
        "managers.tokenizer_manager.TokenizerManager.update_weights_from_disk",
        "BEFORE",
        "control:check_weights",
        "an unknown format crashes SGLang's scheduler",
    ),
    (
        "managers.tokenizer_manager.TokenizerManager.pause_generation",
        "BEFORE",
        "control:check_pause",
        "a decode server asks a prefill server twice for what it retracts, and waits in vain",
    ),
    (
        "managers.multi_tokenizer_mixin.TokenizerWorker.pause_generation",
        "BEFORE",
        "control:check_pause",
        "so does one with several tokenizers",
    ),
    (
        "managers.tokenizer_manager.TokenizerManager.generate_request",
        "BEFORE",
        "body:check_request",
        "values of a wrong type are passed on, and crash SGLang's scheduler",
    ),
    (
        "managers.tokenizer_manager.TokenizerManager._tokenize_one_request",
        "AROUND",
        "media:refuse_wrong_media",
        "SGLang answers a picture that cannot be read with HTTP 500",
    ),
)
# Those of one release: a later one has cured the defect, brought it, or moved its function.
ROWS_OF: dict[str, tuple[tuple[str, str, str, str], ...]] = {
    "0.5.13.post1": (
        (
            "entrypoints.context.SimpleContext.append_output",
            "AROUND",
            "streamed_text:of_responses",
            "with --incremental-streaming-output, a streamed response would be its last chunk",
        ),
        (
            "entrypoints.anthropic.serving.AnthropicServing.handle_messages",
            "AROUND",
            "other_apis:refuse_anthropic",
            "SGLang answers a client's error with HTTP 500, or breaks a stream off",
        ),
        (
            "entrypoints.anthropic.serving.AnthropicServing.handle_count_tokens",
            "AROUND",
            "other_apis:refuse_anthropic",
            "SGLang answers a client's error with HTTP 500 here, too",
        ),
        (
            "managers.utils.is_health_check_generate_req",
            "AROUND",
            "control:is_health_check",
            "an id that is a list crashes SGLang's scheduler",
        ),
        (
            "utils.common._get_fastapi_request_path",
            "AROUND",
            "middleware:path_of",
            "with metrics, SGLang answers `/v1/loads` with HTTP 500",
        ),
        (
            "entrypoints.openai.serving_completions.OpenAIServingCompletion"
            "._generate_completion_stream",
            "AROUND",
            "streamed_text:of_completions",
            "with --incremental-streaming-output, SGLang cuts new text off as if it were sent",
        ),
        (
            "managers.scheduler.Scheduler.on_idle",
            "BEFORE",
            "control:answer_health_checks",
            "a health check right after an answer fails 20 s later",
        ),
        (
            "managers.scheduler_components.output_sender.SenderWrapper.send_output",
            "BEFORE",
            "control:answer_aborted",
            "with several HTTP processes, SGLang never answers a request that its queue drops",
        ),
        (
            "managers.scheduler.Scheduler.flush_cache",
            "BEFORE",
            "control:drop_finished",
            "new weights right after an answer crash SGLang's scheduler",
        ),
        (
            "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
            ".update_weights_from_distributed",
            "AROUND",
            "control:update_from_group",
            "SGLang's scheduler asserts that the group exists",
        ),
        (
            "model_executor.model_runner.ModelRunner.send_weights_to_remote_instance",
            "AROUND",
            "control:send_weights",
            "a missing group crashes SGLang's scheduler",
        ),
        (
            "managers.tokenizer_manager.TokenizerManager.generate_request",
            "AROUND",
            "lifecycle:forget_unsent",
            "SGLang keeps what it knows of a request that it refuses later",
        ),
        (
            "managers.tokenizer_manager.TokenizerManager._resolve_lora_path",
            "BEFORE",
            "lifecycle:add_prefixes",
            "with n > 1, SGLang unloads an adapter too early, or waits for ever to unload it",
        ),
        (
            "managers.tokenizer_manager.TokenizerManager._handle_abort_req",
            "BEFORE",
            "lifecycle:release_aborted",
            "SGLang waits for ever to unload an adapter whose request was aborted in the queue",
        ),
        (
            "managers.tokenizer_manager.TokenizerManager._handle_abort_finish_reason",
            "AROUND",
            "lifecycle:release_once",
            "SGLang releases an adapter twice for a request that ran or was aborted in the queue",
        ),
    ),
    "0.5.23": (
        (
            "managers.tokenizer_manager.TokenizerManager._validate_one_request",
            "BEFORE",
            "body:refuse_empty",
            "a prompt of no tokens crashes SGLang's scheduler",
        ),
        (
            "model_executor.model_runner_components.weight_exporter.WeightExporter"
            ".send_weights_to_remote_instance",
            "AROUND",
            "control:send_weights",
            "a missing group crashes SGLang's scheduler",
        ),
        (
            "model_executor.model_runner_components.weight_updater.WeightUpdater"
            ".update_weights_from_disk",
            "AROUND",
            "control:update_from_disk",
            "weights that do not fit crash SGLang's scheduler, which loads them once more",
        ),
    ),
}
RESOLVING = "__post_init__" if release.has_own_scheduler_step() else "resolve_once"
MODE = Hook(
    f"server_args.ServerArgs.{RESOLVING}",
    "BEFORE",
    "plugin:check_mode",
    "a wrong mode would be noticed by the first request",
    when=always,
)
HOOKS = [
    Hook(*row, when=guards, optional=True) for row in (*ROWS, *ROWS_OF.get(release.installed(), ()))
]
