"""Every hook of DFLASH into SGLang 0.5.13.post1, with the reason why it must exist."""

from __future__ import annotations

from sglang_dflash.engine.hook_table import EVERYWHERE
from sglang_dflash.seam.flags import names_no_other, process_serves_dflash
from sglang_dflash.seam.hook import Hook, always

DFLASH_HOOKS = (
    *EVERYWHERE,
    Hook(
        "speculative.dflash_utils.validate_dflash_request",
        "REPLACE",
        "engine.hooks:validate_request",
        "the built-in refuses logprobs and grammars",
        always,
    ),
    Hook(
        "server_args.ServerArgs.from_cli_args",
        "AROUND",
        "settings.options:with_flags",
        "SGLang passes its own options on only",
        always,
    ),
    Hook(
        "server_args.ServerArgs.__post_init__",
        "BEFORE",
        "engine.server_args:adopt_speculators",
        "a speculators checkpoint given as --model-path names its target inside",
        names_no_other,
    ),
    Hook(
        "server_args.ServerArgs.__post_init__",
        "BEFORE",
        "engine.server_args:check_target_exists",
        "SGLang takes a folder that does not exist for the id of a hub",
    ),
    Hook(
        "server_args.ServerArgs._handle_model_specific_adjustments",
        "BEFORE",
        "targets.hybrid:check_states",
        "SGLang's advice for recurrent-state targets is for another scheduler",
    ),
    Hook(
        "server_args.ServerArgs._handle_mamba_radix_cache",
        "AROUND",
        "targets.hybrid:share_states",
        "SGLang refuses a radix cache of recurrent states with speculation",
    ),
    Hook(
        "server_args.ServerArgs._handle_kv4_compatibility",
        "BEFORE",
        "targets.kv_dtype:refuse_fp4_kv",
        "SGLang's check of KV in FP4 fails in assertions about its backends",
    ),
    Hook(
        "server_args.ServerArgs._handle_hicache",
        "BEFORE",
        "targets.host_cache:copy_directly",
        "SGLang keeps fa3 away from its copy kernels in decoding, but not in a verify",
    ),
    Hook(
        "server_args.ServerArgs.check_lora_server_args",
        "AROUND",
        "targets.lora:check_adapters",
        "SGLang refuses LoRA adapters with DFLASH",
    ),
    Hook(
        "arg_groups.speculative_hook._handle_dflash",
        "REPLACE",
        "engine.v0_5_13.server_args:handle_dflash",
        "the built-in warns and falls back, where this plugin refuses",
        always,
    ),
    Hook(
        "speculative.dflash_utils.parse_dflash_draft_config",
        "REPLACE",
        "engine.v0_5_13.hooks:parse_draft_config",
        "the whole process uses one reading of the checkpoint",
        always,
    ),
    Hook(
        "model_executor.model_runner.ModelRunner.init_aux_hidden_state_capture",
        "AROUND",
        "engine.v0_5_13.hooks:capture_layers",
        "the last layer can be a target layer",
    ),
    Hook(
        "layers.logits_processor.LogitsProcessor._copy_logits_to_buffer",
        "AROUND",
        "engine.v0_5_13.hooks:logits_of_a_verify",
        "SGLang copies every verify's logits to float32; greedy batches need only the argmax",
        always,
    ),
    Hook(
        "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
        ".update_weights_from_disk",
        "BEFORE",
        "engine.v0_5_13.hooks:before_new_weights",
        "SGLang captures graphs anew with the attention backend of the last verify width",
    ),
    *(
        Hook(
            f"managers.tp_worker.BaseTpWorker.{name}",
            "AROUND",
            "trainer.hooks:divide",
            "SGLang gives all tensors to one model",
        )
        for name in ("update_weights_from_tensor", "update_weights_from_distributed")
    ),
    Hook(
        "managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics",
        "AFTER",
        "report.hooks:meta_info",
        "SGLang has no field for acceptance by block position",
    ),
    Hook(
        "managers.tokenizer_manager.TokenizerManager.convert_logprob_style",
        "AFTER",
        "report.hooks:watched_steps",
        "SGLang has no field for the drafts of a step",
    ),
    Hook(
        "managers.scheduler_components.metrics_reporter"
        ".SchedulerMetricsReporter.report_decode_stats",
        "AROUND",
        "report.hooks:verified_drafts",
        "SGLang's accept rate assumes that blocks are verified whole",
    ),
    Hook(
        "layers.utils.logprob.get_token_ids_logprobs_raw",
        "AROUND",
        "engine.v0_5_13.hooks:token_ids_logprobs",
        "a batch that mixes token_ids_logprob with other logprobs crashes SGLang's scheduler",
        process_serves_dflash,
    ),
    Hook(
        "model_executor.model_runner.ModelRunner.forward_idle",
        "BEFORE",
        "engine.v0_5_13.hooks:without_plan",
        "backends take the block of an idle replica for a tree of EAGLE",
    ),
    Hook(
        "managers.scheduler.Scheduler._get_new_batch_prefill_raw",
        "BEFORE",
        "engine.v0_5_13.hooks:admit_again",
        "SGLang can leave an empty batch full, and then admits no request any more",
    ),
    Hook(
        "managers.schedule_batch.ScheduleBatch.new_tokens_required_next_decode",
        "AROUND",
        "engine.v0_5_13.hooks:tokens_for_next_decode",
        "slots are kept between steps, so a step needs fewer slots than a block has",
    ),
    Hook(
        "model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
        "AFTER",
        "engine.v0_5_13.hooks:cell_size",
        "the draft's KV has its own heads and layers",
    ),
    Hook(
        "model_executor.model_runner.ModelRunner.handle_max_mamba_cache",
        "AROUND",
        "targets.hybrid:bound_states",
        "SGLang allocates the recurrent states of all requests, and of positions, unasked",
    ),
    Hook(
        "mem_cache.memory_pool.MambaPool.__init__",
        "AROUND",
        "targets.hybrid:store_inputs",
        "SGLang stores a recurrent state for each position of a block",
    ),
    Hook(
        "mem_cache.mamba_radix_cache.MambaRadixCache._match_post_processor",
        "BEFORE",
        "targets.hybrid:forget_old_match",
        "SGLang copies a state that was evicted while the request that matched it waited",
    ),
    Hook(
        "mem_cache.kv_cache_builder.get_draft_kv_pool",
        "AROUND",
        "targets.host_cache:draft_kv_pool",
        "SGLang takes the KV pool of the worker's model runner, which is the target's",
    ),
    Hook(
        "arg_groups.pd_disaggregation_hook.handle_pd_disaggregation",
        "AROUND",
        "targets.disaggregation:keep_radix_cache",
        "SGLang refuses a radix cache of decode servers with speculation",
    ),
    Hook(
        "disaggregation.common.conn.CommonKVBootstrapServer._setup_routes",
        "AFTER",
        "targets.disaggregation:keep_description",
        "a decode server cannot know whose KV a prefill server sends",
        always,
    ),
    Hook(
        "disaggregation.common.conn.CommonKVManager._connect",
        "AFTER",
        "targets.transfers:keep_messages_whole",
        "SGLang's threads mix the parts of two messages, and a decode server's thread ends",
    ),
    Hook(
        "disaggregation.common.utils.FastQueue.get",
        "AROUND",
        "targets.transfers:next_chunk",
        "only this tells which request a thread is sending",
    ),
    Hook(
        "disaggregation.utils.get_kv_class",
        "AFTER",
        "targets.transfers:corrected",
        "mooncake frees slots that a thread is sending, and drops the confirmation of an abort",
        always,  # the process of a bootstrap server may have no server arguments
    ),
    Hook(
        "disaggregation.common.conn.CommonKVManager.register_to_bootstrap",
        "AFTER",
        "targets.disaggregation:describe",
        "the process of the bootstrap server may have no server arguments",
    ),
    Hook(
        "disaggregation.decode.DecodePreallocQueue._ensure_prefill_info",
        "AROUND",
        "targets.disaggregation:meet",
        "SGLang pairs servers of other drafts, and its scheduler ends where page sizes differ",
    ),
    Hook(
        "disaggregation.decode.DecodePreallocQueue.resume_retracted_reqs",
        "AFTER",
        "targets.disaggregation:own_all_slots",
        "with a radix cache, SGLang's scheduler ends after a retraction",
    ),
    Hook(
        "disaggregation.prefill.PrefillBootstrapQueue.finalize_bootstrap",
        "AFTER",
        "targets.disaggregation:count_buffers",
        "SGLang sends the buffers of target and draft to servers that have others",
    ),
    Hook(
        "disaggregation.prefill.SchedulerDisaggregationPrefillMixin.send_kv_chunk",
        "AROUND",
        "targets.transfers:send_no_other_prompt",
        "a request that only the prefill server aborts or refuses is answered wrongly",
    ),
    Hook(
        "disaggregation.utils.prepare_abort",
        "AFTER",
        "targets.transfers:keep_own_reason",
        "where one half fails, the other forgets why it has refused the request",
    ),
    Hook(
        "speculative.spec_info.SpeculativeAlgorithm.build_disagg_draft_input",
        "AROUND",
        "targets.arrivals:state_of_arrivals",
        "SGLang makes no state for requests that another server has prefilled",
    ),
    Hook(
        "managers.schedule_batch.Req.offload_kv_cache",
        "AFTER",
        "targets.arrivals:take_out",
        "a decode server keeps KV of retracted requests on the host, and the target's only",
        process_serves_dflash,
    ),
    Hook(
        "managers.schedule_batch.Req.load_kv_cache",
        "AFTER",
        "targets.arrivals:put_back",
        "a decode server keeps KV of retracted requests on the host, and the target's only",
        process_serves_dflash,
    ),
    Hook(
        "mem_cache.kv_cache_builder.maybe_register_hicache_draft",
        "AFTER",
        "targets.host_cache:log_host_memory",
        "SGLang's flags for host memory do not count the draft's KV",
    ),
    Hook(
        "managers.scheduler.Scheduler.attach_hicache_storage_wrapped",
        "AROUND",
        "targets.host_cache:refuse_storage",
        "a running server can be given a storage backend, whose hits may lack the draft's KV",
    ),
    Hook(
        "model_executor.pool_configurator.HybridSWAPoolConfigurator.__init__",
        "AFTER",
        "engine.v0_5_13.hooks:windowed_cell_size",
        "targets with sliding windows have two pools, whose size does not count the draft",
    ),
    Hook(
        "speculative.dflash_utils.scale_kv_cell_size_per_token_for_dflash",
        "REPLACE",
        "engine.v0_5_13.hooks:cell_size_is_counted",
        "the built-in guesses the draft's KV from the target's",
        always,
    ),
    Hook(
        "speculative.dflash_utils.resolve_dflash_verify_mask_policy",
        "REPLACE",
        "engine.v0_5_13.hooks:verify_without_mask",
        "a chain needs no mask; the built-in builds one per request",
        always,
    ),
)

CUDA_HOOKS = (
    Hook(
        "lora.lora_manager.LoRAManager.prepare_lora_batch",
        "AROUND",
        "targets.lora:set_verify_lengths",
        "LoRA backends read the lengths of a prefill, which a verify does not have",
    ),
    Hook(
        "lora.backend.chunked_backend.ChunkedSgmvLoRABackend.prepare_lora_batch",
        "AFTER",
        "targets.lora:run_all_segments",
        "a graph computes as many segments as its capture had, which had no adapters",
    ),
    Hook(
        "model_executor.model_runner.ModelRunner._get_attention_backend_from_str",
        "AFTER",
        "engine.v0_5_13.hooks:room_for_a_block",
        "FA3's page tables end at the context length, a verify up to a block after it",
    ),
    Hook(
        "layers.attention.flashattention_backend.FlashAttentionBackend._apply_cuda_graph_metadata",
        "AROUND",
        "backends.fa3:skip_page_tables",
        "SGLang makes seven launches before each replay; one inside the graph is enough",
        process_serves_dflash,
    ),
    Hook(
        "layers.attention.flashattention_backend"
        ".FlashAttentionBackend.init_forward_metadata_in_graph",
        "AFTER",
        "backends.fa3:begin_forward",
        "fills FA3's page tables in the graph, and drops the schedules of the forward before",
        process_serves_dflash,
    ),
    Hook(
        "layers.attention.hybrid_attn_backend.HybridAttnBackend.init_forward_metadata_in_graph",
        "AFTER",
        "backends.fa3:begin_forward_of_chosen",
        "a target with two backends calls this method on neither of them",
        process_serves_dflash,
    ),
    Hook(
        "layers.attention.hybrid_linear_attn_backend"
        ".HybridLinearAttnBackend.init_forward_metadata_in_graph",
        "AFTER",
        "targets.hybrid_attention:begin_in_full_attention",
        "a target with linear attention calls this method on neither of its backends",
        process_serves_dflash,
    ),
    Hook(
        "layers.attention.hybrid_linear_attn_backend.MambaAttnBackendBase._replay_metadata",
        "AROUND",
        "targets.hybrid_attention:count_padding",
        "SGLang takes each request with one token of context for a padded row",
        process_serves_dflash,
    ),
    Hook(
        "layers.attention.linear.gdn_backend.GDNAttnBackend.forward_extend",
        "AROUND",
        "targets.hybrid_attention:verify_block",
        "SGLang's verify needs room for a recurrent state per position",
        process_serves_dflash,
    ),
    Hook(
        "layers.attention.flashattention_backend.flash_attn_with_kvcache",
        "AROUND",
        "backends.fa3:share_schedules",
        "every layer of a verify schedules the same lengths again",
        process_serves_dflash,
    ),
    Hook(
        "layers.attention.triton_backend.TritonAttnBackend._update_target_verify_buffers",
        "AFTER",
        "backends.triton:fill_starts",
        "SGLang's verifies have as many rows of every request",
        process_serves_dflash,
    ),
    Hook(
        "layers.attention.flashinfer_backend.FlashInferIndicesUpdaterPrefill.__init__",
        "AFTER",
        "backends.flashinfer:plan_on_host",
        "a plan fetches lengths from the device, although the host knows them",
        process_serves_dflash,
    ),
)
