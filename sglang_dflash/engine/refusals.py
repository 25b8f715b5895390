"""Flags, targets and drafts that cannot be served exactly, each refused by name."""

from __future__ import annotations

import math
import shutil
import ssl
from pathlib import Path
from typing import Any

from sglang.srt.configs.model_config import AttentionArch, ModelConfig, is_deepseek_dsa
from sglang.srt.constrained.base_grammar_backend import GRAMMAR_BACKEND_REGISTRY
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs
from torch import nn

from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.checkpoint.fit import Target, defects, misfits
from sglang_dflash.checkpoint.mask_embedding import read_mask_embedding
from sglang_dflash.checkpoint.tensors import Tensors, check_finite
from sglang_dflash.errors import WITHOUT_DFLASH, Refusal
from sglang_dflash.settings.options import has_adapters
from sglang_dflash.settings.platforms import platform_of, verify_backend
from sglang_dflash.step.reservation import GRAIN, ceil_align, longest
from sglang_dflash.targets import kv_dtype as target_kv
from sglang_dflash.targets.host_cache import check_host_cache
from sglang_dflash.targets.hybrid import check_states_are_replayed, keeps_gdn_states

TOGETHER = "SGLang then plans each step for all ranks together, which a block does not support"
ONE_STEP = "it puts prefill and decode into one step, and here they are separate"
SHORTEST_REQUEST = 8  # tokens; SGLang keeps 5 of a request's length for itself
PICKLED_FORMATS = ("pt", "npcache")
FLASHINFER_GDN = "its kernel that verifies a block has not been compared with this package"

# (attribute, values that are served, why the others are not, the fix)
REFUSED_FLAGS: tuple[tuple[str, tuple[Any, ...], str, str], ...] = (
    ("speculative_num_steps", (None, 1), "DFLASH drafts a block in one step", "Leave it out."),
    ("speculative_eagle_topk", (None, 1), "a block is a chain, not a tree", "Leave it out."),
    ("speculative_accept_threshold_single", (1.0,), "it makes output lossy", "Leave it at 1.0."),
    ("speculative_accept_threshold_acc", (1.0,), "it makes output lossy", "Leave it at 1.0."),
    ("speculative_token_map", (None,), "the draft has the target's vocabulary", "Leave it out."),
    ("speculative_adaptive", (False,), "it adapts EAGLE's steps", "Leave it out."),
    ("speculative_moe_a2a_backend", (None,), "the draft has no experts", "Leave it out."),
    (
        "enable_prefill_context_parallel",
        (False,),
        "each rank then has the hidden states of a part of the prompt",
        "Use tensor parallelism instead.",
    ),
    (
        "attn_cp_size",
        (1,),
        "each rank then has the hidden states of a part of the tokens",
        "Use tensor parallelism instead.",
    ),
    ("moe_a2a_backend", ("none",), TOGETHER, "Leave it out."),
    ("moe_dense_tp_size", (None,), TOGETHER, "Leave it out."),
    (
        "enable_attn_tp_input_scattered",
        (False,),
        "each rank then has the hidden states of a part of the prompt",
        "Leave it out.",
    ),
    (
        "enable_dp_attention",
        (False,),
        "ranks without requests must run the same forwards, which a block does not support",
        "Use tensor parallelism instead.",
    ),
    (
        "pp_size",
        (1,),
        "the draft reads layers that are on several ranks",
        "Use tensor parallelism instead.",
    ),
    (
        "disaggregation_mode",
        ("null",),
        "SGLang sends the target's KV only, so the decoding server would lack the draft's",
        "Prefill and decode in one process.",
    ),
    (
        "enable_lora_overlap_loading",
        (None, False),
        "it changes adapters while a batch runs, which has not been compared",
        "Leave it out.",
    ),
    ("lora_use_virtual_experts", (False,), "adapters on experts are not served", "Leave it out."),
    ("enable_lmcache", (False,), "its hits would lack the draft's KV", "Leave it out."),
    (
        "enable_hisparse",
        (False,),
        "it moves KV of the target to the host, and the draft's does not follow",
        "Leave it out.",
    ),
    ("enable_mixed_chunk", (False,), ONE_STEP, "Leave it out."),
    (
        "enable_prefill_delayer",
        (False,),
        "SGLang's delayer needs the overlap scheduler, and a block's commit is waited for",
        "Leave it out.",
    ),
    ("linear_attn_decode_backend", (None, "triton", "cutedsl"), FLASHINFER_GDN, "Give triton."),
    ("linear_attn_prefill_backend", (None, "triton", "cutedsl"), FLASHINFER_GDN, "Give triton."),
    ("linear_attn_backend", ("triton", "cutedsl"), FLASHINFER_GDN, "Give triton."),
    ("enable_pdmux", (False,), ONE_STEP, "Leave it out."),
    (
        "grpc_mode",
        (False,),
        "its server hands requests to the scheduler unchecked, and wrong ones crash it",
        "Serve HTTP.",
    ),
    (
        "use_ray",
        (False,),
        "SGLang loads no plugins in Ray's actors, so its own DFLASH would serve there",
        "Leave it out.",
    ),
    (
        "enable_two_batch_overlap",
        (False,),
        "it splits a batch into two forwards, and a block is not split",
        "Leave it out.",
    ),
    (
        "debug_tensor_dump_output_folder",
        (None,),
        "SGLang cannot write the lists of hidden states that the draft reads",
        "Leave it out.",
    ),
    (
        "is_embedding",
        (False,),
        "such a server writes no text, so nothing is drafted",
        "Leave --speculative-algorithm out.",
    ),
    (
        "dllm_algorithm",
        (None,),
        "it is for targets that write blocks by diffusion themselves",
        "Leave it out.",
    ),
)

# The same for a CPU: SGLang would end with a traceback, most while it loads the target.
REFUSED_ON_A_CPU: tuple[tuple[str, tuple[Any, ...], str, str], ...] = (
    (
        "enable_torch_compile",
        (False,),
        "SGLang compiles there for servers without speculation only",
        "Leave it out.",
    ),
    ("kv_canary", ("none",), "SGLang's canary needs CUDA", "Leave it out."),
    ("rl_on_policy_target", (None,), "SGLang computes its RoPE on CUDA", "Leave it out."),
    (
        "enable_forward_pass_metrics",
        (False,),
        "SGLang times each forward with events of CUDA",
        "Leave it out.",
    ),
    ("enable_symm_mem", (False,), "it is memory of CUDA", "Leave it out."),
    ("torchao_config", ("",), "quantised weights are not served there", "Leave it out."),
    ("enforce_piecewise_cuda_graph", (False,), "these are graphs of CUDA", "Leave it out."),
    (
        "offload_group_size",
        (-1, 0),
        "SGLang copies the weights in a stream of CUDA",
        "Leave it out.",
    ),
)


def check_flags(server_args: ServerArgs) -> None:
    """Raise `Refusal` for flags that do not go with DFLASH."""
    if is_deepseek_dsa(server_args.get_model_config().hf_config):  # SGLang sets flags for it
        raise Refusal(
            f"The target {server_args.model_path} uses sparse attention (DSA) with backends of its "
            "own, and this release cannot verify with them.",
            WITHOUT_DFLASH,
        )
    _check_values(server_args, REFUSED_FLAGS, "")
    if server_args.device == "cpu":
        _check_values(server_args, REFUSED_ON_A_CPU, f" {platform_of(server_args).place}")
    _check_adapters(server_args)
    _check_keys(server_args)
    _check_ports(server_args)
    _check_certificate(server_args)
    _check_sigquit_handler(server_args)
    _check_numactl(server_args)
    _check_strict_thinking(server_args)
    _check_detokenizers(server_args)
    if server_args.speculative_moe_runner_backend != server_args.moe_runner_backend:
        raise Refusal(
            "DFLASH drafts have no experts.", "Leave --speculative-moe-runner-backend out."
        )


def check_running(_: Any, request: Any) -> None:
    """BEFORE `TokenizerControlMixin.set_internal_state`: as when the server starts."""
    for flag, served, why, fix in REFUSED_FLAGS:
        value = request.server_args.get(flag, served[0])
        if value not in served:
            raise Refusal(f"server_args.{flag} is {value}, but {why}.", fix)


def _check_values(
    server_args: ServerArgs, refused: tuple[tuple[str, tuple[Any, ...], str, str], ...], where: str
) -> None:
    for name, served, reason, fix in refused:
        value = getattr(server_args, name)
        if value not in served:
            given = "--" + name.replace("_", "-") + ("" if value is True else f" {value}")
            raise Refusal(f"DFLASH does not work with {given}{where}: {reason}.", fix)


def _check_keys(server_args: ServerArgs) -> None:
    """SGLang checks API keys in its main process only, which does not always serve HTTP."""
    keys = {"--api-key": server_args.api_key, "--admin-api-key": server_args.admin_api_key}
    given = [flag for flag, key in keys.items() if key is not None]
    elsewhere = "--enable-http2" if server_args.enable_http2 else "--tokenizer-worker-num"
    if given and (server_args.enable_http2 or server_args.tokenizer_worker_num > 1):
        raise Refusal(
            f"{' and '.join(given)} would not be checked with {elsewhere}: SGLang then serves HTTP "
            "from other processes, which know no keys.",
            f"Leave {elsewhere} out, or check keys in front of the server.",
        )


def _check_ports(server_args: ServerArgs) -> None:
    """SGLang binds the port once for each replica."""
    if server_args.dp_size > 1 and server_args.nccl_port is not None:
        raise Refusal(
            f"--nccl-port {server_args.nccl_port} is one port, and each of --dp-size "
            f"{server_args.dp_size} replicas needs its own.",
            "Leave --nccl-port out.",
        )


def _check_certificate(server_args: ServerArgs) -> None:
    """SGLang reads these files when the target is loaded, which may take minutes.

    Without a password OpenSSL would ask for it on the terminal.
    """
    certificate, password = server_args.ssl_certfile, server_args.ssl_keyfile_password
    if certificate is None:
        return
    for flag, given in (
        ("--enable-ssl-refresh", server_args.enable_ssl_refresh),
        ("--enable-http2", server_args.enable_http2),
    ):
        if given and password is not None:
            raise Refusal(
                f"{flag} does not work with --ssl-keyfile-password: SGLang would load the key "
                "without its password.",
                "Leave one of them out.",
            )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, server_args.ssl_keyfile, password or "")
        if server_args.ssl_ca_certs is not None:
            context.load_verify_locations(server_args.ssl_ca_certs)
    except OSError as error:
        raise Refusal(
            f"HTTPS cannot be served with --ssl-certfile {certificate} and --ssl-keyfile "
            f"{server_args.ssl_keyfile}: {error}.",
            "Give a certificate, its key, and --ssl-keyfile-password if the key has one.",
        ) from None


def _check_sigquit_handler(server_args: ServerArgs) -> None:
    """A handler is a function, so only `sglang.Engine` can give one."""
    if isinstance(server_args.custom_sigquit_handler, str):
        raise Refusal(
            f"--custom-sigquit-handler {server_args.custom_sigquit_handler} is text, and SGLang "
            "needs a function.",
            "Leave it out, or give a function to sglang.Engine.",
        )


def _check_numactl(server_args: ServerArgs) -> None:
    """SGLang starts a shell script that ends when it does not find the command."""
    needed = server_args.numa_node is not None and envs.SGLANG_NUMA_BIND_V2.get()
    if needed and shutil.which("numactl") is None:
        raise Refusal(
            "--numa-node starts processes with the command numactl, which is not there.",
            "Install numactl, or leave the flag out.",
        )


def _check_strict_thinking(server_args: ServerArgs) -> None:
    """SGLang fails when its scheduler starts or, with some parsers, at the first request."""
    backend = server_args.grammar_backend
    if not server_args.enable_strict_thinking or backend in GRAMMAR_BACKEND_REGISTRY:
        return
    if backend == "none" or (backend != "xgrammar" and server_args.reasoning_parser is not None):
        raise Refusal(
            f"--enable-strict-thinking does not work with --grammar-backend {backend}: only the "
            "masks of xgrammar can filter the tokens of a thought.",
            "Give --grammar-backend xgrammar.",
        )


def _check_detokenizers(server_args: ServerArgs) -> None:
    """SGLang divides answers among detokenizers by the tokenizer worker that a request names.

    Without a tokenizer, SGLang starts no detokenizers.
    """
    many = server_args.detokenizer_worker_num > 1 and not server_args.skip_tokenizer_init
    if many and server_args.tokenizer_worker_num == 1:
        raise Refusal(
            f"--detokenizer-worker-num {server_args.detokenizer_worker_num} ends the server at its "
            "first request: SGLang chooses a detokenizer by the tokenizer worker of the request, "
            "and a request of a single one names none.",
            "Leave it out, or add --tokenizer-worker-num 2 or more.",
        )


def _check_adapters(server_args: ServerArgs) -> None:
    platform = platform_of(server_args)
    served = platform.lora_backends
    if has_adapters(server_args) and server_args.lora_backend not in served:
        raise Refusal(
            f"--lora-backend {server_args.lora_backend} does not serve LoRA adapters with DFLASH "
            f"{platform.place}.",
            f"Give --lora-backend {' or '.join(served)}." if served else WITHOUT_DFLASH,
        )


def check_draft(server_args: ServerArgs, draft: DFlashConfig, tensors: Tensors) -> None:
    """Raise `Refusal` for a draft that cannot be served."""
    width = server_args.speculative_num_draft_tokens - draft.sample_from_anchor
    found = defects(draft, tensors, width)
    if found:
        reasons, fixes = _joined(found)
        raise Refusal(f"The draft {draft.path} cannot be served: {reasons}", fixes)
    if not tensors.known and server_args.speculative_draft_load_format != "dummy":
        raise Refusal(
            f"The draft {draft.path} holds no safetensors file.", "Fetch the draft again."
        )
    _check_load_format(server_args, draft)
    _check_quantization(server_args, draft)
    _check_windows(server_args, draft)
    check_finite(Path(draft.path))  # before the target is loaded, which may take minutes
    if draft.mask_embedding:
        read_mask_embedding(draft)


def _check_load_format(server_args: ServerArgs, draft: DFlashConfig) -> None:
    """Refuse formats with which SGLang would open pickles beside the draft's safetensors files."""
    asked = server_args.speculative_draft_load_format or server_args.load_format
    if asked in PICKLED_FORMATS:
        raise Refusal(
            f"The load format {asked} opens pickles in the draft {draft.path}, and these can run "
            "any code.",
            "Give --speculative-draft-load-format safetensors.",
        )


def _check_quantization(server_args: ServerArgs, draft: DFlashConfig) -> None:
    method, platform = draft.quantization_method, platform_of(server_args)
    if method is not None and not platform.quantised_weights:
        raise Refusal(
            f"The draft {draft.path} is quantised ({method}), which is not served "
            f"{platform.place}.",
            "Use its unquantised checkpoint.",
        )
    asked = server_args.speculative_draft_model_quantization
    if asked is not None and asked not in (method, server_args.quantization):
        raise Refusal(
            f"--speculative-draft-model-quantization {asked} does not work: the draft is "
            f"{method or 'unquantised'} and is served as it is.",
            "Leave it out.",
        )


def _check_windows(server_args: ServerArgs, draft: DFlashConfig) -> None:
    if all(view.window is None for view in draft.attention):
        return
    backend = server_args.speculative_draft_attention_backend
    able = platform_of(server_args).sliding_drafts
    if backend not in able:
        raise Refusal(
            f"The draft {draft.path} has sliding-window layers, and {backend} does not compute "
            "them correctly without causality.",
            f"Give --speculative-draft-attention-backend {' or '.join(able)}.",
        )


def check_target(server_args: ServerArgs, draft: DFlashConfig) -> None:
    """Raise `Refusal` for a target that cannot be served, or not with this draft."""
    model_config = server_args.get_model_config()
    _check_fit(server_args, model_config, draft)
    _check_heads(server_args, draft)
    target_kv.check_kv(server_args, model_config)
    _check_platform(server_args, model_config)
    check_states_are_replayed(server_args, model_config)
    check_host_cache(server_args, model_config, draft)
    cls, name = _target_class(model_config)
    _check_experts(server_args, model_config, cls)
    if not any(hasattr(cls, f"set_{method}_layers_to_capture") for method in ("dflash", "eagle3")):
        raise Refusal(
            f"The target class {name} returns no hidden states (it has neither "
            "set_dflash_layers_to_capture nor set_eagle3_layers_to_capture).",
            WITHOUT_DFLASH,
        )


def _check_fit(server_args: ServerArgs, model_config: ModelConfig, draft: DFlashConfig) -> None:
    text = model_config.hf_text_config
    target = Target(
        path=server_args.model_path,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
    )
    found = misfits(draft, target)
    if found:
        reasons, fixes = _joined(found)
        raise Refusal(
            f"The draft {draft.path} does not fit the target {target.path}: {reasons}", fixes
        )


def _check_experts(server_args: ServerArgs, model_config: ModelConfig, target: type) -> None:
    """SGLang looks for experts when the target is loaded, and fails where it finds none."""
    counted = hasattr(target, "get_model_config_for_expert_location")
    routed = hasattr(model_config.hf_text_config, "num_experts_per_tok")
    recorder = "expert_distribution_recorder_mode", "enable_expert_distribution_metrics"
    unserved = (() if counted else recorder) + (() if routed else ("enable_return_routed_experts",))
    given = ["--" + name.replace("_", "-") for name in unserved if getattr(server_args, name)]
    if given:
        raise Refusal(
            f"{' and '.join(given)} cannot be served: SGLang finds no experts in the target "
            f"{server_args.model_path}.",
            "Leave it out.",
        )


def _joined(found: list[Refusal]) -> tuple[str, str]:
    """All reasons, and each fix once."""
    reasons = " ".join(refusal.what for refusal in found)
    fixes = " ".join(dict.fromkeys(refusal.fix for refusal in found))
    return reasons, fixes


def _check_heads(server_args: ServerArgs, draft: DFlashConfig) -> None:
    ranks = server_args.tp_size
    for kind, count in (("attention", draft.num_heads), ("KV", draft.num_kv_heads)):
        if count % ranks and ranks % count:
            raise Refusal(
                f"The draft's {count} {kind} heads cannot be split over --tp {ranks}.",
                "Give a --tp that divides them.",
            )


def _check_platform(server_args: ServerArgs, model_config: ModelConfig) -> None:
    platform, target = platform_of(server_args), f"The target {server_args.model_path}"
    if verify_backend(server_args) == "flashinfer" and _has_windows(model_config):
        raise Refusal(
            f"{target} has sliding-window layers, and SGLang's flashinfer backend cannot verify a "
            "block of them.",
            "Give --attention-backend fa3 or triton.",
        )
    if has_adapters(server_args) and model_config.attention_arch == AttentionArch.MLA:
        raise Refusal(
            f"{target} uses latent attention (MLA). SGLang's LoRA has kernels of its own for it, "
            "which have not been compared with DFLASH.",
            "Leave --enable-lora and --lora-paths out.",
        )
    if has_adapters(server_args) and keeps_gdn_states(model_config):
        cls, name = _target_class(model_config)
        if not hasattr(cls, "get_hidden_dim"):
            raise Refusal(
                f"{target} has linear attention, and SGLang's {name} does not give LoRA the shapes "
                "of its projections. LoRA guesses wrong ones for its queries.",
                "Leave --enable-lora and --lora-paths out.",
            )
    if not platform.quantised_weights and model_config.quantization is not None:
        raise Refusal(
            f"{target} is quantised ({model_config.quantization}), which is not served "
            f"{platform.place}.",
            "Use its unquantised checkpoint.",
        )


def _has_windows(model_config: ModelConfig) -> bool:
    """Whether SGLang's class of the target reports a sliding window to its backend."""
    cls, _ = _target_class(model_config)
    return model_config.is_hybrid_swa or hasattr(cls, "get_attention_sliding_window_size")


def _target_class(model_config: ModelConfig) -> tuple[type, str]:
    """SGLang's class of the target, and its name."""
    from sglang.srt.models.registry import ModelRegistry  # imports every model

    found: tuple[type, str] = ModelRegistry.resolve_model_cls(model_config.hf_config.architectures)
    return found


def check_loaded_adapters(server_args: ServerArgs, target: nn.Module) -> None:
    """Raise `Refusal` for adapters on parts where SGLang cannot run them in a block.

    target: the loaded model. Its modules show on which parts the adapters are.
    """
    from sglang.srt.lora.layers import FusedMoEWithLoRA, ParallelLMHeadWithLoRA

    parts = {type(module) for module in target.modules()}
    if FusedMoEWithLoRA in parts:
        raise Refusal(
            "LoRA adapters on experts are not served with DFLASH: SGLang's buffers for them have "
            "one token per request.",
            "Give --lora-target-modules without gate_up_proj and down_proj.",
        )
    platform = platform_of(server_args)
    if ParallelLMHeadWithLoRA in parts and not platform.adapted_heads:
        raise Refusal(
            f"LoRA adapters on lm_head are not served with DFLASH {platform.place}: SGLang's "
            "torch_native backend gives requests of one prefill each other's adapters.",
            "Give --lora-target-modules without lm_head.",
        )


def longest_request(tokens: int, reserved: int, page_size: int) -> int:
    """The longest request for which a KV pool of this size has room; raises `Refusal`.

    reserved: tokens that a step needs behind the committed ones.
    """
    room = longest(tokens, reserved, page_size)
    if room < SHORTEST_REQUEST:
        needed = ceil_align(SHORTEST_REQUEST + reserved, math.lcm(GRAIN, page_size))
        raise Refusal(
            f"A KV pool of {tokens} tokens has no room for one request and its block.",
            f"Give --max-total-tokens {needed} or more, or leave more memory for it.",
        )
    return room
