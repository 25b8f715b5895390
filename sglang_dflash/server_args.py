"""Normalise or refuse server arguments for DFLASH: the one place where flags are judged."""

from __future__ import annotations

import copy
import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from sglang.srt.configs.linear_attn_model_registry import get_linear_attn_config
from sglang.srt.configs.model_config import AttentionArch, ModelConfig, is_deepseek_dsa
from sglang.srt.server_args import ServerArgs

from sglang_dflash.checkpoint import hub, load, speculators
from sglang_dflash.checkpoint.detect import read_json
from sglang_dflash.checkpoint.fit import Target, defects, misfits
from sglang_dflash.checkpoint.tensors import Tensors
from sglang_dflash.config import DFlashConfig
from sglang_dflash.errors import Refusal
from sglang_dflash.flags import draft_ahead, verify_widths

logger = logging.getLogger(__name__)

# The first is advised: on CUDA the one that serves every target and runs on every GPU.
DRAFT_BACKENDS = {"cuda": ("triton", "fa3", "flashinfer"), "cpu": ("torch_native",)}

# Flags that cannot be served exactly: (attribute, values that are fine, what to do).
REFUSED_FLAGS: tuple[tuple[str, tuple, str], ...] = (
    ("speculative_num_steps", (None, 1), "DFLASH drafts a block in one step; leave it out"),
    ("speculative_eagle_topk", (None, 1), "a block is a chain, not a tree; leave it out"),
    ("speculative_accept_threshold_single", (1.0,), "it makes output lossy; leave it at 1.0"),
    ("speculative_accept_threshold_acc", (1.0,), "it makes output lossy; leave it at 1.0"),
    ("speculative_token_map", (None,), "the draft uses the target's own vocabulary; leave it out"),
    ("speculative_adaptive", (False,), "it adapts EAGLE's steps; leave it out"),
    ("speculative_moe_a2a_backend", (None,), "the draft has no experts; leave it out"),
    ("enable_dp_attention", (False,), "use tensor parallelism instead"),
    ("pp_size", (1,), "use tensor parallelism instead"),
    ("disaggregation_mode", ("null",), "serve prefill and decode in one process"),
    ("enable_lora", (None, False), "leave the adapters out, or serve without speculation"),
    ("kv_cache_dtype", ("auto",), "the draft's KV keeps the model's dtype; leave it at auto"),
    ("enable_hierarchical_cache", (False,), "host hits would lack the draft's KV; leave it out"),
    ("enable_lmcache", (False,), "its hits would lack the draft's KV; leave it out"),
    ("enable_hisparse", (False,), "leave it out"),
    ("enable_mixed_chunk", (False,), "prefill and verify are separate steps; leave it out"),
    ("enable_pdmux", (False,), "leave it out"),
    ("enable_two_batch_overlap", (False,), "leave it out"),
    ("dllm_algorithm", (None,), "leave it out"),
)


@lru_cache(maxsize=8)
def load_draft(path: str, revision: str | None) -> tuple[DFlashConfig, Tensors]:
    """Configuration and headers of a draft, a folder here or on the model hub, read once."""
    return load(hub.draft_folder(path, revision))


def _draft(server_args: ServerArgs) -> tuple[DFlashConfig, Tensors]:
    if server_args.speculative_draft_model_path is None:
        raise Refusal(
            "--speculative-algorithm DFLASH needs a draft: give --speculative-draft-model-path."
        )
    return load_draft(
        server_args.speculative_draft_model_path, server_args.speculative_draft_model_revision
    )


def draft_config(server_args: ServerArgs) -> DFlashConfig:
    """The draft of these server arguments; raises `Refusal`."""
    return _draft(server_args)[0]


def adopt_speculators(server_args: ServerArgs) -> None:
    """BEFORE `ServerArgs.__post_init__`: a speculators checkpoint as --model-path serves itself.

    It names its target inside and is the draft; explicit flags win.
    """
    if (server_args.speculative_algorithm or "DFLASH").upper() != "DFLASH":
        return
    file = Path(server_args.model_path) / "config.json"
    raw = read_json(file) if file.is_file() else {}
    if speculators.matches(raw):
        verifier = speculators.verifier_of(raw)
        if verifier is None:
            raise Refusal(
                f"{file} is a speculators draft that names no target: give the target as "
                "--model-path and this folder as --speculative-draft-model-path."
            )
        server_args.speculative_algorithm = "DFLASH"
        server_args.speculative_draft_model_path = (
            server_args.speculative_draft_model_path or server_args.model_path
        )
        logger.info("%s is a DFlash draft; its target is %s.", server_args.model_path, verifier)
        server_args.model_path = verifier
    target = server_args.model_path
    is_path = target.startswith((".", "/", "~"))
    if server_args.speculative_algorithm is not None and is_path and not Path(target).exists():
        raise Refusal(f"The target {target} does not exist: give the path of a target.")


def handle_dflash(server_args: ServerArgs) -> None:
    """REPLACE `speculative_hook._handle_dflash`; raises `Refusal` for what cannot be served."""
    if is_deepseek_dsa(server_args.get_model_config().hf_config):
        raise Refusal(
            f"The target {server_args.model_path} attends to tokens that it picks (DSA), with "
            "backends of its own, which this release does not verify with: serve it without "
            "--speculative-algorithm DFLASH."
        )
    for name, fine, advice in REFUSED_FLAGS:
        if getattr(server_args, name) not in fine:
            flag = name.replace("_", "-")
            raise Refusal(
                f"DFLASH does not work with --{flag} {getattr(server_args, name)}: {advice}."
            )
    if server_args.speculative_moe_runner_backend != server_args.moe_runner_backend:
        raise Refusal("DFLASH drafts have no experts: leave --speculative-moe-runner-backend out.")
    draft, tensors = _draft(server_args)
    server_args.speculative_num_draft_tokens = _block_size(server_args, draft)
    server_args.speculative_num_steps = server_args.speculative_eagle_topk = 1
    server_args.speculative_draft_attention_backend = _draft_backend(server_args)
    _check_target(server_args, draft)
    _check_draft(server_args, draft, tensors)
    verify_widths(server_args)
    draft_ahead(server_args)
    if server_args.max_running_requests is None:
        server_args.max_running_requests = 48
        logger.info("DFLASH: --max-running-requests 48; give the flag to change it.")
    server_args.disable_overlap_schedule = True  # spec-v1: the scheduler waits for the commit
    # Fused with the next norm, a layer's all-reduce comes after its hidden states are captured.
    if server_args.enable_flashinfer_allreduce_fusion:
        logger.info("DFLASH: all-reduces are not fused, so that hidden states are captured whole.")
        server_args.enable_flashinfer_allreduce_fusion = False
    # The draft's weights never arrive with an update of the target's: keep a copy over a release.
    server_args.enable_draft_weights_cpu_backup = server_args.enable_memory_saver


def draft_server_args(server_args: ServerArgs, context_len: int, dtype: torch.dtype) -> ServerArgs:
    """What the draft's own worker is made of; its graphs are captured later.

    context_len, dtype: the target's. The draft reads the target's states and embeddings as they
    are, so it computes in their dtype, whatever its own checkpoint has.
    """
    args = copy.deepcopy(server_args)
    args.skip_tokenizer_init = True
    args.disable_cuda_graph = args.disable_piecewise_cuda_graph = True
    args.attention_backend = server_args.speculative_draft_attention_backend
    args.speculative_draft_attention_backend = None
    args.prefill_attention_backend = args.decode_attention_backend = None
    # With sample_from_anchor the draft reads one position fewer than the target verifies.
    args.speculative_num_draft_tokens -= draft_config(server_args).sample_from_anchor
    args.context_length = context_len
    args.dtype = str(dtype).removeprefix("torch.")
    args.kv_cache_dtype = "auto"
    return args


def verify_backend(server_args: ServerArgs) -> str:
    """The target's attention backend that a block is verified with."""
    prefill, decode = server_args.get_attention_backends()
    return prefill if server_args.speculative_attention_mode == "prefill" else decode


def _block_size(server_args: ServerArgs, draft: DFlashConfig) -> int:
    """The served block: an explicit flag, else the trained length."""
    given = {
        "--speculative-dflash-block-size": server_args.speculative_dflash_block_size,
        "--speculative-num-draft-tokens": server_args.speculative_num_draft_tokens,
    }
    longest = draft.verify_width
    values = {value for value in given.values() if value is not None} or {longest}
    if len(values) > 1:
        raise Refusal(f"{' and '.join(given)} are aliases but differ: {sorted(values)}.")
    size = values.pop()
    if not 2 <= size <= longest:
        raise Refusal(
            f"A block of {size} does not work: this draft was trained with {longest}, so give 2 to "
            f"{longest} (the anchor counts)."
        )
    window = server_args.speculative_draft_window_size
    if window is not None and window < size:
        raise Refusal(
            f"A block of {size} does not fit --speculative-draft-window-size {window}: give at "
            f"least {size}."
        )
    if size < longest and not draft.variable_block_size:
        logger.warning(
            f"DFLASH: a block of {size}, but the draft was trained with {longest} and may draft "
            f"worse with fewer masks. --speculative-dflash-verify-width {size} keeps them."
        )
    return size


def _draft_backend(server_args: ServerArgs) -> str:
    """The attention backend of the draft: an explicit flag, else the target's."""
    able = DRAFT_BACKENDS.get(server_args.device)
    if able is None:
        raise Refusal(f"DFLASH runs on cuda and cpu, not on {server_args.device}.")
    target = set(server_args.get_attention_backends())
    if not target <= set(able):
        raise Refusal(
            f"DFLASH verifies with the attention backends {', '.join(able)}, not "
            f"{', '.join(sorted(target - set(able)))}: give --attention-backend {able[0]}."
        )
    chosen = server_args.speculative_draft_attention_backend
    if chosen is None:
        _, chosen = server_args.get_attention_backends()
    if chosen not in able:
        raise Refusal(
            f"The draft attends without causality, which {chosen} does not offer: give "
            f"--speculative-draft-attention-backend {' or '.join(able)}."
        )
    return str(chosen)


def _check_draft(server_args: ServerArgs, draft: DFlashConfig, tensors: Tensors) -> None:
    width = server_args.speculative_num_draft_tokens - draft.sample_from_anchor
    found = defects(draft, tensors, width)
    if found:
        raise Refusal(f"The draft {draft.path} cannot be served: " + " ".join(map(str, found)))
    if not tensors.known and server_args.speculative_draft_load_format != "dummy":
        raise Refusal(f"The draft {draft.path} holds no safetensors file: fetch the draft again.")
    method = (draft.quantization or {}).get("quant_method")
    if method is not None and server_args.device == "cpu":
        raise Refusal(
            f"The draft {draft.path} is quantised ({method}), which is not served on a CPU: use "
            "its unquantised checkpoint."
        )
    asked = server_args.speculative_draft_model_quantization
    if asked is not None and asked != method and asked != server_args.quantization:
        raise Refusal(
            f"--speculative-draft-model-quantization {asked} does not work: the draft is "
            f"{method or 'unquantised'} and is served as it is."
        )
    server_args.speculative_draft_model_quantization = method
    for file in sorted(Path(draft.path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - no mapping
                if not bool(torch.isfinite(weights.get_tensor(name).float()).all()):
                    raise Refusal(f"{file} holds NaN or infinity in {name}: fetch the draft again.")
    _check_windows(server_args, draft)


def _check_windows(server_args: ServerArgs, draft: DFlashConfig) -> None:
    """Which backends compute the draft's sliding layers right (SGLang's code, read)."""
    sliding = [view for view in draft.attention if view.window is not None]
    if not sliding or server_args.device == "cpu":
        return
    backend = server_args.speculative_draft_attention_backend
    if any(view.anchored for view in sliding):
        raise Refusal(
            f"The sliding windows of the draft {draft.path} count from the anchor, which no CUDA "
            "backend of this SGLang does: use a z-lab draft of this target."
        )
    if backend != "triton":
        raise Refusal(
            f"The draft {draft.path} has sliding-window layers, which {backend} does not compute "
            "right without causality: give --speculative-draft-attention-backend triton."
        )


def refuse_recurrent(server_args: ServerArgs) -> None:
    """BEFORE `ServerArgs._handle_model_specific_adjustments`: targets that keep a state a request.

    SGLang's own check there advises flags of another scheduler. The state after a verify is that of
    the whole block; this release does not go back to the last accepted token's.
    """
    if (server_args.speculative_algorithm or "").upper() != "DFLASH":
        return
    model_config = server_args.get_model_config()
    if not (_keeps_state(model_config.hf_config) or _keeps_state(model_config.hf_text_config)):
        return
    radix = (
        "" if server_args.disable_radix_cache else ", nor does SGLang without --disable-radix-cache"
    )
    raise Refusal(
        f"The target {server_args.model_path} keeps a recurrent state (Mamba, GDN or alike), and "
        f"this release does not commit the right step's after a partial acceptance{radix}: serve "
        "it without --speculative-algorithm DFLASH."
    )


def _keeps_state(config: Any) -> bool:
    """SGLang's own sign of such targets: their config class counts the layers that keep a state."""
    kind = type(config)
    if hasattr(kind, "mamba_layer_ids"):  # Granite's and Nemotron's may count none
        return bool(config.mamba_layer_ids)
    return hasattr(kind, "linear_layer_ids") or get_linear_attn_config(config) is not None


def _has_fp8_kv(model_config: ModelConfig) -> bool:
    """Whether a ModelOpt checkpoint on this machine asks SGLang for KV in FP8.

    What is fetched from a hub later is judged by `DFlashWorker`, by what SGLang made of it.
    """
    config = getattr(model_config.hf_config, "quantization_config", None)
    file = Path(model_config.model_path) / "hf_quant_config.json"
    if config is None and file.is_file():
        config = read_json(file)
    if not isinstance(config, dict):
        return False
    if not str(config.get("quant_method", "modelopt")).startswith("modelopt"):
        return False
    nested = config.get("quantization")
    if isinstance(nested, dict):
        return str(nested.get("kv_cache_quant_algo")).upper() == "FP8"
    scheme = config.get("kv_cache_scheme")
    return isinstance(scheme, dict) and (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)


def _has_windows(model_config: ModelConfig) -> bool:
    """Whether SGLang's class of the target tells its backend of a sliding window."""
    cls, _ = _target_class(model_config)
    return model_config.is_hybrid_swa or hasattr(cls, "get_attention_sliding_window_size")


def _target_class(model_config: ModelConfig) -> tuple[type, str]:
    """SGLang's class of the target, and its name."""
    from sglang.srt.models.registry import ModelRegistry  # imports every model there is

    found: tuple[type, str] = ModelRegistry.resolve_model_cls(model_config.hf_config.architectures)
    return found


def _check_target(server_args: ServerArgs, draft: DFlashConfig) -> None:
    model_config = server_args.get_model_config()
    text = model_config.hf_text_config
    target = Target(
        path=server_args.model_path,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
    )
    found = misfits(draft, target)
    if found:
        raise Refusal(
            f"The draft {draft.path} does not fit the target {target.path}: "
            + " ".join(map(str, found))
        )
    heads = {"attention heads": draft.num_heads, "KV heads": draft.num_kv_heads}
    for what, count in heads.items():
        if count % server_args.tp_size and server_args.tp_size % count:
            raise Refusal(
                f"The draft's {count} {what} cannot be split over --tp {server_args.tp_size}."
            )
    if _has_fp8_kv(model_config):
        raise Refusal(
            f"The checkpoint of the target {server_args.model_path} asks for KV in FP8, and this "
            "release keeps the draft's and the target's KV in the model's dtype: use a checkpoint "
            "without kv_cache_quant_algo, or serve it without --speculative-algorithm DFLASH."
        )
    if verify_backend(server_args) == "flashinfer" and _has_windows(model_config):
        raise Refusal(
            f"The target {server_args.model_path} has sliding-window layers, for which SGLang's "
            "flashinfer backend cannot verify a block: give --attention-backend fa3 or triton."
        )
    if server_args.device == "cpu" and model_config.attention_arch == AttentionArch.MLA:
        raise Refusal(
            f"The target {server_args.model_path} attends in a latent space (MLA), which is not "
            "served on a CPU: use a GPU."
        )
    if server_args.device == "cpu" and (method := model_config.quantization) is not None:
        raise Refusal(
            f"The target {server_args.model_path} is quantised ({method}), which is not served on "
            "a CPU: use its unquantised checkpoint."
        )
    cls, name = _target_class(model_config)
    if not any(hasattr(cls, f"set_{method}_layers_to_capture") for method in ("dflash", "eagle3")):
        raise Refusal(
            f"The target class {name} hands out no hidden states (it has neither "
            "set_dflash_layers_to_capture nor set_eagle3_layers_to_capture): serve it without "
            "--speculative-algorithm DFLASH."
        )
