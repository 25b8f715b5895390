"""The hooks that every release has, with the reason why each must exist."""

from __future__ import annotations

from sglang_dflash.seam.flags import process_serves_dflash
from sglang_dflash.seam.hook import Hook, always

EVERYWHERE = (
    Hook(
        "utils.hf_transformers.common.get_generation_config",
        "AROUND",
        "engine.hooks:get_generation_config",
        "SGLang opens a draft's generation_config.json, whatever it is, and uses nothing of it",
        always,
    ),
    Hook(
        "server_args.ServerArgs.add_cli_args",
        "AFTER",
        "settings.options:add_cli_args",
        "options that SGLang does not have",
        always,
    ),
    Hook(
        "utils.hf_transformers.config.get_config",
        "AROUND",
        "engine.hooks:get_config",
        "SGLang builds the draft runner from a Transformers config",
        always,
    ),
    Hook(
        "managers.scheduler.get_exception_traceback",
        "AROUND",
        "engine.hooks:text_of_an_exception",
        "some refusals depend on the loaded target; SGLang logs them as tracebacks",
        always,
    ),
    Hook(
        "managers.tokenizer_control_mixin.TokenizerControlMixin.set_internal_state",
        "BEFORE",
        "engine.refusals:check_running",
        "a running server can be given settings that are refused when it starts",
    ),
    Hook(
        "entrypoints.engine.Engine._launch_detokenizer_subprocesses",
        "AROUND",
        "streams.detokenizer:launch",
        "SGLang sends characters twice where two chunks in a row end inside one",
    ),
    Hook(
        "entrypoints.openai.serving_chat.OpenAIServingChat._generate_chat_stream",
        "AROUND",
        "streams.chat:chat_stream",
        "SGLang's parsers, and its streamed top logprobs, are right for one token a chunk only",
    ),
    Hook(
        "entrypoints.openai.serving_chat.OpenAIServingChat._generate_stream_content",
        "AROUND",
        "streams.chat:chunks_of_a_stream",
        "SGLang drops the logprobs of tokens that add no text, as of a stop string",
    ),
    Hook(
        "entrypoints.openai.serving_responses.OpenAIServingResponses._generate_with_builtin_tools",
        "AROUND",
        "streams.chat:harmony_stream",
        "of a chunk of several tokens, SGLang sends the text of the last",
    ),
    Hook(
        "managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter.__post_init__",
        "AFTER",
        "report.hooks:count_steps",
        "the labels of Prometheus are known only there",
    ),
    Hook(
        "managers.scheduler.Scheduler.get_init_info",
        "AFTER",
        "report.hooks:describe",
        "/server_info shows the server arguments, but not what the plugin made of them",
    ),
    Hook(
        "managers.scheduler.Scheduler.get_internal_state",
        "AFTER",
        "report.hooks:describe_replica",
        "SGLang's data-parallel controller drops what a scheduler says when it starts",
    ),
    Hook(
        "managers.tokenizer_control_mixin.TokenizerControlMixin.get_internal_state",
        "AROUND",
        "report.hooks:describe_first",
        "/server_info of several replicas would not show what serves, nor name the replicas",
    ),
    Hook(
        "entrypoints.engine.Engine._launch_scheduler_processes",
        "AROUND",
        "engine.processes:watch_all",
        "SGLang does not see the end of a replica, nor of any scheduler on a second machine",
    ),
    Hook(
        "mem_cache.common.release_kv_cache",
        "BEFORE",
        "trainer.features:finish",
        "features of a request are written when it ends, wherever SGLang ends it",
        process_serves_dflash,
    ),
    Hook(
        "layers.logits_processor.LogitsProcessor.forward",
        "AROUND",
        "engine.capture:append_final_state",
        "the last layer's state is known only there",
        always,
    ),
    Hook(
        "managers.tokenizer_manager.TokenizerManager._send_one_request",
        "BEFORE",
        "engine.hooks:seed_answers_apart",
        "SGLang gives the n answers to a request one seed, and without DFLASH it is not used",
    ),
    Hook(
        "managers.tokenizer_manager.TokenizerManager.update_weights_from_disk",
        "AROUND",
        "trainer.hooks:choose_folder",
        "SGLang's call has one path, and no field that says whose weights are there",
    ),
    Hook(
        "managers.tokenizer_manager.TokenizerManager._wait_for_model_update_from_disk",
        "AROUND",
        "trainer.hooks:keep_name",
        "SGLang names the model by the path of the last weights, whosever they are",
    ),
    *(
        Hook(
            f"managers.tokenizer_control_mixin.TokenizerControlMixin.{name}",
            "AROUND",
            "trainer.hooks:choose_model",
            "a field that one release has not, or a format that no draft can be checked by",
        )
        for name in ("update_weights_from_tensor", "update_weights_from_distributed")
    ),
    Hook(
        "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
        ".update_weights_from_disk",
        "AROUND",
        "trainer.hooks:update_from_disk",
        "SGLang has one path for target and draft",
    ),
)
