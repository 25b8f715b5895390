"""The two entry points of `sglang.srt.plugins`, and every hook into SGLang in three tables.

SGLang only logs a plugin that fails and goes on with its built-in DFLASH. So the first thing that
`dflash` does is to replace the creation of the DFLASH worker by one that refuses unless everything
below is in place; nothing that can fail comes before it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, NamedTuple

SGLANG_VERSION = "0.5.13.post1"


class Hook(NamedTuple):
    target: str  # dotted name in sglang.srt
    kind: str  # HookType member
    function: str  # module:name in this package, imported at first use
    why: str


DFLASH_HOOKS = (
    Hook(
        "server_args.ServerArgs.add_cli_args",
        "AFTER",
        "flags:add_cli_args",
        "flags of ours, handed to the schedulers in the environment",
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
        "server_args:refuse_recurrent",
        "SGLang's advice for recurrent-state targets is of another scheduler",
    ),
    Hook(
        "arg_groups.speculative_hook._handle_dflash",
        "REPLACE",
        "server_args:handle_dflash",
        "the built-in warns and falls back where we refuse",
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
        "one reading of the checkpoint for the whole process",
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
        "SGLang copies every verify's logits to float32, of which greedy batches need the argmax",
    ),
    Hook(
        "managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics",
        "AFTER",
        "hooks:meta_info",
        "acceptance by block position is no field of SGLang's",
    ),
    Hook(
        "entrypoints.openai.serving_chat.OpenAIServingChat._process_logprobs_tokens",
        "AROUND",
        "hooks:streamed_logprobs",
        "SGLang streams the first token's top logprobs for all tokens of a chunk",
    ),
    Hook(
        "layers.utils.logprob.get_token_ids_logprobs_raw",
        "AROUND",
        "hooks:token_ids_logprobs",
        "SGLang dies of a batch that mixes token_ids_logprob with other logprobs",
    ),
    Hook(
        "managers.schedule_batch.ScheduleBatch.new_tokens_required_next_decode",
        "AROUND",
        "hooks:tokens_for_next_decode",
        "slots are kept between steps, so a step needs fewer than a block",
    ),
    *(
        Hook(
            f"model_executor.model_runner.ModelRunner.update_weights_from_{source}",
            "AFTER",
            "cpu.graphs:forget",
            "CPU graphs hold the tensors that were the weights",
        )
        for source in ("disk", "tensor", "distributed", "ipc")
    ),
    Hook(
        "model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
        "AFTER",
        "hooks:cell_size",
        "the draft's KV has its own heads and layers",
    ),
    Hook(
        "model_executor.pool_configurator.HybridSWAPoolConfigurator.__init__",
        "AFTER",
        "hooks:windowed_cell_size",
        "targets with sliding windows have two pools, whose size counts no draft",
    ),
    Hook(
        "model_executor.model_runner.ModelRunner._get_attention_backend_from_str",
        "AFTER",
        "hooks:room_for_a_block",
        "FA3's page tables end at the context, a verify up to a block behind it",
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
        "a chain needs no mask; the built-in builds one a request",
    ),
)

CUDA_HOOKS = (
    Hook(
        "layers.attention.flashattention_backend.FlashAttentionBackend._apply_cuda_graph_metadata",
        "AROUND",
        "runtime.fa3:leave_to_the_graph",
        "seven launches before each replay, of what one inside of it does",
    ),
    Hook(
        "layers.attention.flashattention_backend"
        ".FlashAttentionBackend.init_forward_metadata_in_graph",
        "AFTER",
        "runtime.fa3:begin_forward",
        "that one, and what the next hook makes belongs to one forward",
    ),
    Hook(
        "layers.attention.hybrid_attn_backend.HybridAttnBackend.init_forward_metadata_in_graph",
        "AFTER",
        "runtime.fa3:begin_in_either",
        "a target with two backends never tells them that a graph begins",
    ),
    Hook(
        "layers.attention.flashattention_backend.flash_attn_with_kvcache",
        "AROUND",
        "runtime.fa3:scheduled",
        "every layer of a verify schedules the same lengths again",
    ),
    Hook(
        "layers.attention.flashinfer_backend.FlashInferIndicesUpdaterPrefill.__init__",
        "AFTER",
        "runtime.flashinfer:plan_by_the_host",
        "a plan waits for the device to tell lengths that the host knows",
    ),
)

CPU_HOOKS = (
    Hook(
        "model_executor.model_runner.ModelRunner._get_attention_backend_from_str",
        "AROUND",
        "cpu.stand_ins:attention_backend",
        "SGLang's torch_native pads queries and knows no TARGET_VERIFY",
    ),
    Hook(
        "mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup",
        "REPLACE",
        "cpu.stand_ins:no_kv_copy_kernel",
        "Triton kernel",
    ),
    Hook(
        "mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.alloc_extend",
        "REPLACE",
        "cpu.stand_ins:alloc_extend",
        "Triton kernel",
    ),
    Hook(
        "mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.alloc_decode",
        "REPLACE",
        "cpu.stand_ins:alloc_decode",
        "Triton kernel",
    ),
    Hook(
        "constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask",
        "AROUND",
        "cpu.stand_ins:apply_vocab_mask",
        "no CPU branch",
    ),
    Hook(
        "server_args.ServerArgs._handle_cpu_backends",
        "BEFORE",
        "cpu.stand_ins:default_backend",
        "SGLang's default backend needs AMX and cannot verify",
    ),
    Hook(
        "layers.utils.hash.murmur_hash32",
        "REPLACE",
        "cpu.stand_ins:murmur_hash32",
        "Triton kernel",
    ),
    Hook(
        "batch_invariant_ops.enable_batch_invariant_mode",
        "REPLACE",
        "cpu.stand_ins:keep_aten",
        "Triton kernels; a row's result on CPU is the same up to rounding",
    ),
    Hook(
        "arg_groups.speculative_hook.handle_speculative_decoding",
        "AFTER",
        "cpu.stand_ins:default_limits",
        "SGLang sizes KV for a GPU and wants a NUMA node a rank",
    ),
)


def dflash() -> None:
    """Take over `--speculative-algorithm DFLASH`."""
    _guard_dflash()
    _print_refusals_plainly()
    _register(DFLASH_HOOKS)
    if _has_cuda():
        _register(CUDA_HOOKS)  # of modules that load on CUDA alone


def dflash_cpu() -> None:
    """Let SGLang run on a machine without an accelerator."""
    if _has_accelerator():
        return
    from sglang.srt.utils import common

    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # before any child starts
    common.is_cpu.cache_clear()
    from sglang.srt import server_args

    server_args.add_deterministic_attention_backend_choices(["torch_native"])
    server_args.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    _register(CPU_HOOKS)


def missing_hooks() -> list[str]:
    """Why a DFLASH server must not start; empty if all is in place."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    try:
        installed = version("sglang")
    except PackageNotFoundError:
        installed = "of unknown version"
    if installed != SGLANG_VERSION:
        return [f"SGLang is {installed}, this release serves {SGLANG_VERSION}"]
    wanted = DFLASH_HOOKS + (() if _has_accelerator() else CPU_HOOKS)
    wanted += CUDA_HOOKS if _has_cuda() else ()
    return [
        f"no hook on {hook.target}"
        for hook in wanted
        if f"sglang.srt.{hook.target}" not in HookRegistry._patched
    ]


def _guard_dflash() -> None:
    """Replace the creation of the DFLASH worker, and judge its arguments before children start."""
    from sglang.srt.arg_groups import speculative_hook
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    create_worker = SpeculativeAlgorithm.create_worker
    handle = speculative_hook.handle_speculative_decoding

    def refuse_if_incomplete() -> None:
        from sglang_dflash.errors import Refusal

        if missing := missing_hooks():
            raise Refusal(
                f"sglang-dflash cannot serve DFLASH here: {'; '.join(missing)}. Install "
                f"sglang=={SGLANG_VERSION}, load both of its plugins (SGLANG_PLUGINS unset), or "
                "leave the plugin dflash out of SGLANG_PLUGINS to run SGLang's own DFLASH."
            )

    def guarded_create(self: Any, server_args: Any) -> Any:
        if not self.is_dflash():
            return create_worker(self, server_args)
        refuse_if_incomplete()
        from sglang.srt.models.registry import ModelRegistry

        from sglang_dflash.runtime.worker import DFlashWorker

        ModelRegistry.register("sglang_dflash.model", overwrite=True)
        return DFlashWorker

    def guarded_handle(server_args: Any) -> None:
        if (server_args.speculative_algorithm or "").upper() == "DFLASH":
            refuse_if_incomplete()
            from sglang_dflash.server_args import draft_config

            draft_config(server_args)  # before SGLang tries to read the draft in its own way
        handle(server_args)

    SpeculativeAlgorithm.create_worker = guarded_create
    speculative_hook.handle_speculative_decoding = guarded_handle


def _print_refusals_plainly() -> None:
    """A `Refusal` that ends the process is one paragraph on stderr, without a traceback."""
    shown = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if kind.__module__ == "sglang_dflash.errors":
            print(f"sglang-dflash: {error}", file=sys.stderr)
        else:
            shown(kind, error, trace)

    sys.excepthook = excepthook


def _register(hooks: tuple[Hook, ...]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        HookRegistry.register(
            f"sglang.srt.{hook.target}", _lazy(hook.function), HookType[hook.kind]
        )


def _lazy(function: str) -> Callable[..., Any]:
    """Import our side of a hook at its first call: SGLang's modules load in their own order."""

    place, name = function.split(":")
    modules: list[ModuleType] = []

    def hook(*args: Any, **kwargs: Any) -> Any:
        if not modules:
            modules.append(import_module(f"sglang_dflash.{place}"))
        return getattr(modules[0], name)(*args, **kwargs)

    hook.__qualname__ = function
    return hook


def _has_accelerator() -> bool:
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None


def _has_cuda() -> bool:
    import torch

    return torch.version.cuda is not None and torch.cuda.is_available()
