"""Every hook of DFLASH into SGLang 0.5.23, with the reason why it must exist."""

from __future__ import annotations

from sglang_dflash.engine.hook_table import EVERYWHERE
from sglang_dflash.seam.flags import names_no_other, process_serves_dflash
from sglang_dflash.seam.hook import Hook, always

DFLASH_HOOKS = (
    *EVERYWHERE,
    Hook(
        "speculative.dflash_utils.validate_dflash_request",
        "AROUND",
        "engine.v0_5_23.hooks:validate_request",
        "the built-in lets pass what ends its scheduler, or is left out of the answer",
        process_serves_dflash,
    ),
    Hook(
        "server_args.ServerArgs.from_cli_args",
        "AROUND",
        "engine.v0_5_23.hooks:keep_flags",
        "SGLang passes its own options on only",
        always,
    ),
    # SGLang runs the later of two rows first, and this one needs the algorithm that it sets.
    Hook(
        "server_args.ServerArgs.resolve_once",
        "BEFORE",
        "engine.v0_5_23.server_args:check_flags",
        "SGLang takes a folder that does not exist for the id of a hub, and changes some flags",
    ),
    Hook(
        "server_args.ServerArgs.resolve_once",
        "BEFORE",
        "engine.v0_5_23.server_args:adopt_speculators_once",
        "a speculators checkpoint given as --model-path names its target inside",
        names_no_other,
    ),
    Hook(
        "arg_groups.model_hook.handle_model_specific_adjustments",
        "BEFORE",
        "engine.v0_5_23.server_args:check_target",
        "SGLang's assertions about some targets say nothing of DFLASH",
    ),
    Hook(
        "arg_groups.speculative_hook._handle_dflash",
        "REPLACE",
        "engine.v0_5_23.server_args:handle_dflash",
        "the built-in warns and falls back, where this plugin refuses",
        always,
    ),
    Hook(
        "speculative.dflash_utils.parse_dflash_draft_config",
        "AROUND",
        "engine.v0_5_23.hooks:parse_draft_config",
        "the whole process uses one reading of the checkpoint",
        always,
    ),
    Hook(
        "model_executor.model_runner_components.attention_backend_setup"
        ".configure_aux_hidden_state_capture",
        "AROUND",
        "engine.v0_5_23.hooks:capture_layers",
        "the last layer can be a target layer",
        process_serves_dflash,
    ),
    Hook(
        "speculative.dflash_utils.apply_dflash_verify_logits_adjustments",
        "AROUND",
        "engine.v0_5_23.hooks:no_adjustments",
        "SGLang drops penalties in a block",
        process_serves_dflash,
    ),
    Hook(
        "speculative.dflash_worker_v2.build_grammar_vocab_mask",
        "AROUND",
        "engine.v0_5_23.hooks:masks_of_any_grammar",
        "grammars of outlines, and some of llguidance, cannot go back over drafts",
        process_serves_dflash,
    ),
    Hook(
        "managers.schedule_batch.ScheduleBatch.grammar_needs_sync",
        "AROUND",
        "engine.v0_5_23.hooks:processed_alone",
        "a custom logit processor would read output that lacks a step",
    ),
    Hook(
        "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
        "._accept_grammar_tokens",
        "AROUND",
        "engine.v0_5_23.finish:accept_by_grammar",
        "with speculation, SGLang asks a request's grammar before it looks for the request's end",
        process_serves_dflash,
    ),
    Hook(
        "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
        "._append_decode_hidden_states",
        "AROUND",
        "engine.v0_5_23.finish:states_up_to_the_end",
        "SGLang also returns the hidden states of tokens behind the end",
        process_serves_dflash,
    ),
    Hook(
        "managers.schedule_batch.Req.update_finish_state",
        "AROUND",
        "engine.v0_5_23.finish:finish_in_order",
        "of several ends in a block, SGLang does not take the first",
        process_serves_dflash,
    ),
    *(
        Hook(
            "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
            f".{name}",
            "AROUND",
            "engine.v0_5_23.logprobs:own_prompt",
            "with a retracted request in the batch, a prompt gets the logprobs of another",
            process_serves_dflash,
        )
        for name in ("_apply_prefill_logprobs", "_apply_chunked_prefill_logprobs")
    ),
    Hook(
        "managers.scheduler_components.logprob_result_processor.SchedulerLogprobResultProcessor"
        ".add_logprob_return_values",
        "AROUND",
        "engine.v0_5_23.logprobs:no_token",
        "with speculation, a request that only scores its prompt gets the logprob of a token",
        process_serves_dflash,
    ),
    Hook(
        "session.session_controller.Session.create_req",
        "BEFORE",
        "engine.v0_5_23.finish:forget_behind_the_end",
        "the next turn of a session begins with tokens behind the end of the last answer",
        process_serves_dflash,
    ),
    Hook(
        "managers.schedule_batch.Req.owned_kv_len",
        "AFTER",
        "engine.v0_5_23.finish:known_kv_len",
        "a later prompt would count one token more as cached than without speculation",
        process_serves_dflash,
    ),
    Hook(
        "session.streaming_session.StreamingSession.try_cache_finished_req",
        "AROUND",
        "engine.v0_5_23.finish:keep_known_kv",
        "with speculation, a session keeps the KV of its last token, computed or not",
        process_serves_dflash,
    ),
    Hook(
        "managers.tp_worker.TpModelWorker.get_worker_info",
        "AFTER",
        "engine.v0_5_23.hooks:bound_requests",
        "a request for which the KV pool has no room beside its blocks fails, or waits for ever",
        process_serves_dflash,
    ),
    Hook(
        "mem_cache.kv_cache_configurator.get_req_to_token_extra_context_len",
        "AFTER",
        "engine.v0_5_23.hooks:rows_for_two_blocks",
        "at the end of the context, SGLang writes slots into the next request's row",
        process_serves_dflash,
    ),
    Hook(
        "model_executor.model_runner_components.attention_backend_setup"
        "._build_full_attention_backend_from_str",
        "AROUND",
        "engine.v0_5_23.hooks:room_for_two_blocks",
        "FA3's page tables end at the context length, a block after it",
        process_serves_dflash,
    ),
    Hook(
        "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
        "._resolve_spec_v2_tokens",
        "AROUND",
        "engine.v0_5_23.report:observe",
        "the worker does not learn of steps whose request had ended",
        process_serves_dflash,
    ),
    Hook(
        "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
        "._select_runners",
        "AROUND",
        "engine.v0_5_23.weights:select_runners",
        "SGLang gives a draft the target's tensors, or a part of its own",
    ),
    *(
        Hook(
            name,
            "AROUND",
            "engine.v0_5_23.weights:read_own",
            "a rank that cannot read its tensors leaves the call, and the others would wait for it",
        )
        for name in (
            "managers.tp_worker.BaseTpWorker.deserialize_own_rank",
            "model_executor.model_runner_components.weight_updater.WeightUpdater"
            ".receive_weights_from_distributed",
        )
    ),
    *(
        Hook(
            f"model_executor.model_runner_components.weight_updater.WeightUpdater.{name}",
            "AROUND",
            "trainer.hooks:divide",
            "SGLang gives all tensors to one model, and skips a name that this has not",
        )
        for name in ("update_weights_from_tensor", "load_weights_from_distributed")
    ),
    Hook(
        "managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics",
        "AFTER",
        "engine.v0_5_23.report:by_position",
        "SGLang has no field for acceptance by block position",
    ),
    Hook(
        "managers.tokenizer_manager.TokenizerManager.update_request_meta_info",
        "AROUND",
        "engine.v0_5_23.report:watched_steps",
        "SGLang has no field for the drafts of a step",
    ),
)
CUDA_HOOKS: tuple[Hook, ...] = ()
