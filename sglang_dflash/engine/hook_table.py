"""The hooks that every release has, with the reason why each must exist."""

from __future__ import annotations

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
)
