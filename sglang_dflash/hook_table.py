"""Every hook of DFLASH into SGLang, with the reason why it must exist."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple


class Hook(NamedTuple):
    target: str  # dotted name in sglang.srt
    kind: str  # HookType member
    function: str  # module:name in this package, imported at first use
    why: str


def register(hooks: tuple[Hook, ...]) -> None:
    """Register hooks with SGLang, which applies them when all plugins are loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        target = f"sglang.srt.{hook.target}"
        HookRegistry.register(target, _lazy(hook.function), HookType[hook.kind])


def _lazy(function: str) -> Callable[..., Any]:
    """Import the hook's function at its first call: SGLang's modules load in their own order."""
    place, name = function.split(":")
    module = cache(lambda: import_module(f"sglang_dflash.{place}"))

    def hook(*args: Any, **kwargs: Any) -> Any:
        return getattr(module(), name)(*args, **kwargs)

    hook.__qualname__ = function
    return hook


DFLASH_HOOKS = (
    Hook(
        "utils.hf_transformers.common.get_generation_config",
        "AROUND",
        "hooks:get_generation_config",
        "SGLang opens a draft's generation_config.json, whatever it is, and uses nothing of it",
    ),
    Hook(
        "server_args.ServerArgs.add_cli_args",
        "AFTER",
        "options:add_cli_args",
        "options that SGLang does not have",
    ),
    Hook(
        "server_args.ServerArgs.__post_init__",
        "BEFORE",
        "server_args:adopt_speculators",
        "a speculators checkpoint given as --model-path names its target inside",
    ),
    Hook(
        "server_args.ServerArgs._handle_model_specific_adjustments",
        "BEFORE",
        "hybrid_targets:check_states",
        "SGLang's advice for recurrent-state targets is for another scheduler",
    ),
    Hook(
        "server_args.ServerArgs._handle_mamba_radix_cache",
        "AROUND",
        "hybrid_targets:share_states",
        "SGLang refuses a radix cache of recurrent states with speculation",
    ),
    Hook(
        "server_args.ServerArgs._handle_kv4_compatibility",
        "BEFORE",
        "target_kv:refuse_fp4_kv",
        "SGLang's check of KV in FP4 fails in assertions about its backends",
    ),
    Hook(
        "server_args.ServerArgs._handle_hicache",
        "BEFORE",
        "host_cache:copy_directly",
        "SGLang keeps fa3 away from its copy kernels in decoding, but not in a verify",
    ),
    Hook(
        "server_args.ServerArgs.check_lora_server_args",
        "AROUND",
        "adapters:check_adapters",
        "SGLang refuses LoRA adapters with DFLASH",
    ),
    Hook(
        "lora.lora_manager.LoRAManager.load_lora_weights",
        "AFTER",
        "adapter_weights:check_weights",
        "an adapter whose weights do not fit crashes SGLang's scheduler at its first request",
    ),
    Hook(
        "lora.lora_manager.LoRAManager.load_lora_weights_from_tensors",
        "AFTER",
        "adapter_weights:check_weights",
        "so does one that a request brings",
    ),
    Hook(
        "managers.tp_worker.BaseTpWorker.load_lora_adapter",
        "AROUND",
        "adapter_weights:load_on_all_ranks",
        "if one rank cannot load an adapter, the others serve it",
    ),
    Hook(
        "managers.tp_worker.BaseTpWorker.load_lora_adapter_from_tensors",
        "AROUND",
        "adapter_weights:load_on_all_ranks",
        "tensors that cannot be read crash SGLang's scheduler, also on one rank of several",
    ),
    Hook(
        "lora.lora_manager.LoRAManager.init_memory_pool",
        "AFTER",
        "adapter_weights:check_all_weights",
        "the adapters that a server starts with are loaded before their buffers exist",
    ),
    Hook(
        "arg_groups.speculative_hook._handle_dflash",
        "REPLACE",
        "server_args:handle_dflash",
        "the built-in warns and falls back, where this plugin refuses",
    ),
    Hook(
        "speculative.dflash_utils.validate_dflash_request",
        "REPLACE",
        "hooks:validate_request",
        "the built-in refuses logprobs and grammars",
    ),
    Hook(
        "speculative.dflash_utils.parse_dflash_draft_config",
        "REPLACE",
        "hooks:parse_draft_config",
        "the whole process uses one reading of the checkpoint",
    ),
    Hook(
        "utils.hf_transformers.config.get_config",
        "AROUND",
        "hooks:get_config",
        "SGLang builds the draft runner from a Transformers config",
    ),
    Hook(
        "model_executor.model_runner.ModelRunner.init_aux_hidden_state_capture",
        "AROUND",
        "hooks:capture_layers",
        "the last layer can be a target layer",
    ),
    Hook(
        "layers.logits_processor.LogitsProcessor.forward",
        "AROUND",
        "hooks:append_final_state",
        "the last layer's state is known only there",
    ),
    Hook(
        "layers.logits_processor.LogitsProcessor._copy_logits_to_buffer",
        "AROUND",
        "hooks:logits_of_a_verify",
        "SGLang copies every verify's logits to float32; greedy batches need only the argmax",
    ),
    Hook(
        "utils.set_uvicorn_logging_configs",
        "BEFORE",
        "requests.http_door:install",
        "handlers answer wrong bodies with HTTP 500; this is the last call before HTTP is served",
    ),
    Hook(
        "utils.common._get_fastapi_request_path",
        "AROUND",
        "requests.http_door:path_of",
        "with metrics, SGLang answers `/v1/loads` with HTTP 500",
    ),
    Hook(
        "managers.multi_tokenizer_mixin.write_data_for_multi_tokenizer",
        "BEFORE",
        "requests.http_workers:replace_application",
        "processes that serve HTTP beside the main one load no plugins",
    ),
    Hook(
        "entrypoints.ollama.serving.OllamaServing.handle_chat",
        "AROUND",
        "requests.other_apis:refuse_ollama",
        "SGLang answers its own refusals with HTTP 500 here",
    ),
    Hook(
        "entrypoints.ollama.serving.OllamaServing.handle_generate",
        "AROUND",
        "requests.other_apis:refuse_ollama",
        "SGLang answers its own refusals with HTTP 500 here, too",
    ),
    Hook(
        "entrypoints.ollama.serving.OllamaServing._stream_chat_response",
        "AROUND",
        "requests.streamed_text:of_ollama",
        "SGLang drops the text of the last chunk, here up to a block",
    ),
    Hook(
        "entrypoints.ollama.serving.OllamaServing._stream_generate_response",
        "AROUND",
        "requests.streamed_text:of_ollama",
        "SGLang drops the text of the last chunk here, too",
    ),
    Hook(
        "entrypoints.openai.serving_completions.OpenAIServingCompletion"
        "._generate_completion_stream",
        "AROUND",
        "requests.streamed_text:of_completions",
        "with --incremental-streaming-output, SGLang cuts new text off as if it were sent",
    ),
    Hook(
        "entrypoints.context.SimpleContext.append_output",
        "AROUND",
        "requests.streamed_text:of_responses",
        "with --incremental-streaming-output, a streamed response would be its last chunk",
    ),
    Hook(
        "entrypoints.anthropic.serving.AnthropicServing.handle_messages",
        "AROUND",
        "requests.other_apis:refuse_anthropic",
        "SGLang answers a client's error with HTTP 500, or breaks a stream off",
    ),
    Hook(
        "entrypoints.anthropic.serving.AnthropicServing.handle_count_tokens",
        "AROUND",
        "requests.other_apis:refuse_anthropic",
        "SGLang answers a client's error with HTTP 500 here, too",
    ),
    Hook(
        "entrypoints.openai.serving_responses.OpenAIServingResponses.responses_stream_generator",
        "AROUND",
        "requests.other_apis:end_with_an_error",
        "SGLang breaks the stream off",
    ),
    Hook(
        "managers.communicator.FanOutCommunicator.__call__",
        "AROUND",
        "requests.control:check_control",
        "some requests that steer a server crash SGLang's scheduler",
    ),
    Hook(
        "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
        ".release_memory_occupation",
        "AROUND",
        "requests.control:release_memory",
        "SGLang's scheduler asserts that no request runs",
    ),
    Hook(
        "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
        ".resume_memory_occupation",
        "AROUND",
        "requests.control:resume_memory",
        "memory that was not released crashes SGLang's scheduler",
    ),
    Hook(
        "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
        ".update_weights_from_tensor",
        "AROUND",
        "requests.control:update_from_tensor",
        "tensors that SGLang cannot read crash its scheduler",
    ),
    Hook(
        "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
        ".update_weights_from_distributed",
        "AROUND",
        "requests.control:update_from_group",
        "SGLang's scheduler asserts that the group exists",
    ),
    Hook(
        "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
        ".update_weights_from_disk",
        "BEFORE",
        "hooks:before_new_weights",
        "SGLang captures graphs anew with the attention backend of the last verify width",
    ),
    Hook(
        "managers.tokenizer_manager.TokenizerManager.dump_requests_before_crash",
        "BEFORE",
        "hooks:no_wait_for_core_dumps",
        "SGLang waits a minute for core dumps that CUDA does not write",
    ),
    Hook(
        "managers.utils.is_health_check_generate_req",
        "AROUND",
        "requests.control:is_health_check",
        "an id that is a list crashes SGLang's scheduler",
    ),
    Hook(
        "session.session_controller.Session.create_req",
        "BEFORE",
        "requests.sessions:begin_anew",
        "a request that replaces a session's history crashes SGLang's scheduler",
    ),
    Hook(
        "session.session_controller.SessionReqNode.clear",
        "AROUND",
        "requests.sessions:clear",
        "an id that a session has twice crashes SGLang's scheduler",
    ),
    Hook(
        "model_executor.model_runner.ModelRunner.send_weights_to_remote_instance",
        "AROUND",
        "requests.control:send_weights",
        "a missing group crashes SGLang's scheduler",
    ),
    Hook(
        "managers.tokenizer_manager.TokenizerManager.update_weights_from_disk",
        "BEFORE",
        "requests.control:check_weights",
        "an unknown format crashes SGLang's scheduler",
    ),
    Hook(
        "managers.tokenizer_manager.TokenizerManager.generate_request",
        "BEFORE",
        "requests.generation:check_request",
        "values of a wrong type are passed on, and crash SGLang's scheduler",
    ),
    Hook(
        "managers.tokenizer_manager.TokenizerManager.generate_request",
        "AROUND",
        "requests.ended_early:forget_unsent",
        "SGLang keeps what it knows of a request that it refuses later",
    ),
    Hook(
        "managers.tokenizer_manager.TokenizerManager._tokenize_one_request",
        "AROUND",
        "requests.media:refuse_wrong_media",
        "SGLang answers a picture that cannot be read with HTTP 500",
    ),
    Hook(
        "managers.tokenizer_manager.TokenizerManager._resolve_lora_path",
        "BEFORE",
        "requests.ended_early:add_prefixes",
        "with n > 1, SGLang unloads an adapter too early, or waits for ever to unload it",
    ),
    Hook(
        "managers.tokenizer_manager.TokenizerManager._handle_abort_req",
        "BEFORE",
        "requests.ended_early:release_aborted",
        "SGLang waits for ever to unload an adapter whose request was aborted in the queue",
    ),
    Hook(
        "managers.tokenizer_manager.TokenizerManager._handle_abort_finish_reason",
        "AROUND",
        "requests.ended_early:release_once",
        "with the hook before, or if the request ran, SGLang gives a use of an adapter back twice",
    ),
    Hook(
        "managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics",
        "AFTER",
        "reports:meta_info",
        "SGLang has no field for acceptance by block position",
    ),
    Hook(
        "managers.tokenizer_manager.TokenizerManager.convert_logprob_style",
        "AFTER",
        "reports:watched_steps",
        "SGLang has no field for the drafts of a step",
    ),
    Hook(
        "managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter.__post_init__",
        "AFTER",
        "reports:count_steps",
        "the labels of Prometheus are known only there",
    ),
    Hook(
        "managers.scheduler_components.metrics_reporter"
        ".SchedulerMetricsReporter.report_decode_stats",
        "AROUND",
        "reports:verified_drafts",
        "SGLang's accept rate assumes that blocks are verified whole",
    ),
    Hook(
        "managers.scheduler.Scheduler.get_init_info",
        "AFTER",
        "reports:describe",
        "/server_info shows the server arguments, but not what the plugin made of them",
    ),
    Hook(
        "entrypoints.engine.Engine._launch_detokenizer_subprocesses",
        "AROUND",
        "detokenizer:launch",
        "SGLang sends characters twice where two chunks in a row end inside one",
    ),
    Hook(
        "entrypoints.openai.serving_chat.OpenAIServingChat._generate_chat_stream",
        "AROUND",
        "streams:chat_stream",
        "SGLang's parsers, and its streamed top logprobs, are right for one token a chunk only",
    ),
    Hook(
        "entrypoints.openai.serving_chat.OpenAIServingChat._generate_stream_content",
        "AROUND",
        "streams:chunks_of_a_stream",
        "SGLang drops the logprobs of tokens that add no text, as of a stop string",
    ),
    Hook(
        "entrypoints.openai.serving_responses.OpenAIServingResponses._generate_with_builtin_tools",
        "AROUND",
        "streams:harmony_stream",
        "of a chunk of several tokens, SGLang sends the text of the last",
    ),
    Hook(
        "layers.utils.logprob.get_token_ids_logprobs_raw",
        "AROUND",
        "hooks:token_ids_logprobs",
        "a batch that mixes token_ids_logprob with other logprobs crashes SGLang's scheduler",
    ),
    Hook(
        "managers.scheduler.get_exception_traceback",
        "AROUND",
        "hooks:text_of_an_exception",
        "some refusals depend on the loaded target; SGLang logs them as tracebacks",
    ),
    Hook(
        "managers.schedule_batch.ScheduleBatch.new_tokens_required_next_decode",
        "AROUND",
        "hooks:tokens_for_next_decode",
        "slots are kept between steps, so a step needs fewer slots than a block has",
    ),
    Hook(
        "model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
        "AFTER",
        "hooks:cell_size",
        "the draft's KV has its own heads and layers",
    ),
    Hook(
        "model_executor.model_runner.ModelRunner.handle_max_mamba_cache",
        "AROUND",
        "hybrid_targets:bound_states",
        "SGLang allocates the recurrent states of all requests, and of positions, unasked",
    ),
    Hook(
        "mem_cache.memory_pool.MambaPool.__init__",
        "AROUND",
        "hybrid_targets:remember_inputs",
        "SGLang stores a recurrent state for each position of a block",
    ),
    Hook(
        "mem_cache.mamba_radix_cache.MambaRadixCache._match_post_processor",
        "BEFORE",
        "hybrid_targets:forget_old_match",
        "SGLang copies a state that was evicted while the request that matched it waited",
    ),
    Hook(
        "mem_cache.kv_cache_builder.get_draft_kv_pool",
        "AROUND",
        "host_cache:draft_kv_pool",
        "SGLang takes the KV pool of the worker's model runner, which is the target's",
    ),
    Hook(
        "mem_cache.kv_cache_builder.maybe_register_hicache_draft",
        "AFTER",
        "host_cache:log_host_memory",
        "SGLang's flags for host memory do not count the draft's KV",
    ),
    Hook(
        "managers.scheduler.Scheduler.attach_hicache_storage_wrapped",
        "AROUND",
        "host_cache:refuse_storage",
        "a running server can be given a storage backend, whose hits may lack the draft's KV",
    ),
    Hook(
        "model_executor.pool_configurator.HybridSWAPoolConfigurator.__init__",
        "AFTER",
        "hooks:windowed_cell_size",
        "targets with sliding windows have two pools, whose size does not count the draft",
    ),
    Hook(
        "speculative.dflash_utils.scale_kv_cell_size_per_token_for_dflash",
        "REPLACE",
        "hooks:cell_size_is_counted",
        "the built-in guesses the draft's KV from the target's",
    ),
    Hook(
        "speculative.dflash_utils.resolve_dflash_verify_mask_policy",
        "REPLACE",
        "hooks:no_mask",
        "a chain needs no mask; the built-in builds one per request",
    ),
)

CUDA_HOOKS = (
    Hook(
        "lora.lora_manager.LoRAManager.prepare_lora_batch",
        "AROUND",
        "adapters:with_lengths",
        "LoRA backends read the lengths of a prefill, which a verify does not have",
    ),
    Hook(
        "lora.backend.chunked_backend.ChunkedSgmvLoRABackend.prepare_lora_batch",
        "AFTER",
        "adapters:all_segments",
        "a graph computes as many segments as its capture had, which had no adapters",
    ),
    Hook(
        "model_executor.model_runner.ModelRunner._get_attention_backend_from_str",
        "AFTER",
        "hooks:room_for_a_block",
        "FA3's page tables end at the context length, a verify up to a block behind it",
    ),
    Hook(
        "layers.attention.flashattention_backend.FlashAttentionBackend._apply_cuda_graph_metadata",
        "AROUND",
        "attention.fa3:leave_to_the_graph",
        "SGLang makes seven launches before each replay; one inside the graph is enough",
    ),
    Hook(
        "layers.attention.flashattention_backend"
        ".FlashAttentionBackend.init_forward_metadata_in_graph",
        "AFTER",
        "attention.fa3:begin_forward",
        "makes that launch, and clears the schedules that `attention.fa3:scheduled` shares",
    ),
    Hook(
        "layers.attention.hybrid_attn_backend.HybridAttnBackend.init_forward_metadata_in_graph",
        "AFTER",
        "attention.fa3:begin_in_either",
        "a target with two backends calls this method on neither of them",
    ),
    Hook(
        "layers.attention.hybrid_linear_attn_backend"
        ".HybridLinearAttnBackend.init_forward_metadata_in_graph",
        "AFTER",
        "attention.hybrid:begin_in_full_attention",
        "a target with linear attention calls this method on neither of its backends",
    ),
    Hook(
        "layers.attention.hybrid_linear_attn_backend.MambaAttnBackendBase._replay_metadata",
        "AROUND",
        "attention.hybrid:count_padding",
        "SGLang takes each request with one token of context for a padded row",
    ),
    Hook(
        "layers.attention.linear.gdn_backend.GDNAttnBackend.forward_extend",
        "AROUND",
        "attention.hybrid:verify_block",
        "SGLang's verify needs room for a recurrent state per position",
    ),
    Hook(
        "layers.attention.flashattention_backend.flash_attn_with_kvcache",
        "AROUND",
        "attention.fa3:scheduled",
        "every layer of a verify schedules the same lengths again",
    ),
    Hook(
        "layers.attention.flashinfer_backend.FlashInferIndicesUpdaterPrefill.__init__",
        "AFTER",
        "attention.flashinfer:plan_by_the_host",
        "a plan fetches lengths from the device, although the host knows them",
    ),
)
