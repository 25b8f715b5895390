"""The dtype of the target's KV: refused where a verify would round otherwise than decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.environ import envs
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.server_args import ServerArgs

from sglang_dflash.checkpoint.files import read_json
from sglang_dflash.errors import Refusal
from sglang_dflash.settings.platforms import platform_of, verify_backend


def refuse_fp4_kv(server_args: ServerArgs) -> None:
    """BEFORE `ServerArgs._handle_kv4_compatibility`: refuse KV in FP4.

    SGLang itself fails in an assertion there, whatever the algorithm.
    """
    if server_args.kv_cache_dtype == "fp4_e2m1":
        raise Refusal(
            "DFLASH does not work with --kv-cache-dtype fp4_e2m1: SGLang's kernels for it have not "
            "been compared between a token and a block.",
            "Give --kv-cache-dtype fp8_e4m3 or bfloat16.",
        )


def check_kv(server_args: ServerArgs, model_config: ModelConfig) -> None:
    """Check the dtype of the target's KV, which a flag or the checkpoint asks for."""
    target, asked = f"The target {server_args.model_path}", server_args.kv_cache_dtype
    if server_args.quantization_param_path and not platform_of(server_args).scale_files:
        raise Refusal(
            "The scales of --quantization-param-path do not work: SGLang divides K and V by them, "
            "but its attention backends cannot multiply by them.",
            "Use a checkpoint that holds the scales, or leave the flag out.",
        )
    if asked == "auto" and _has_fp8_kv(model_config):
        asked = "fp8_e4m3"
    if asked.startswith("fp8"):
        _check_fp8_kv(server_args, model_config, asked)
    elif asked != "auto" and model_config.dtype == torch.float16:
        raise Refusal(
            f"{target} computes in float16, so its KV cannot be {asked}.",
            "Leave --kv-cache-dtype out, or give --dtype bfloat16.",
        )


def _check_fp8_kv(server_args: ServerArgs, model_config: ModelConfig, asked: str) -> None:
    target, (prefill, decode) = f"The target {server_args.model_path}", _backends(server_args)
    if model_config.attention_arch == AttentionArch.MLA:
        raise Refusal(
            f"{target} uses latent attention (MLA), whose KV is not served in FP8.",
            "Give --kv-cache-dtype bfloat16.",
        )
    if asked == "fp8_e5m2" and "fa3" in (prefill, decode):
        raise Refusal(
            "The attention backend fa3 does not read KV in fp8_e5m2.",
            "Give --kv-cache-dtype fp8_e4m3, or --attention-backend flashinfer.",
        )
    if model_config.dtype == torch.float16 and "fa3" in (prefill, decode):
        raise Refusal(
            f"{target} computes in float16, but fa3 returns bfloat16 if KV is in FP8.",
            "Give --dtype bfloat16, or --attention-backend flashinfer.",
        )
    verify = verify_backend(server_args)
    if "triton" in (verify, decode):
        raise Refusal(
            "The attention backend triton cannot verify a block if KV is in FP8: its kernel for "
            "one token rounds queries and softmax to FP8, and its kernel for a block does not.",
            f"Give --attention-backend {'flashinfer' if asked == 'fp8_e5m2' else 'fa3'}, or "
            "--kv-cache-dtype bfloat16.",
        )
    if verify != decode:
        raise Refusal(
            f"Each attention backend rounds in its own way if KV is in FP8, so {verify} cannot "
            f"verify for {decode}.",
            "Give --speculative-attention-mode decode.",
        )


def check_loaded_kv(server_args: ServerArgs, runner: Any) -> None:
    """Raise `Refusal` if the KV of the loaded target cannot be served. runner: its ModelRunner.

    SGLang reads from the loaded model that KV is in FP8, and sets --kv-cache-dtype. Before, only
    checkpoints on this machine can be checked.
    """
    check_kv(server_args, runner.model_config)
    if not _has_scales(runner.model):
        return
    target, backends = f"The target {server_args.model_path}", _backends(server_args)
    if runner.kv_cache_dtype == runner.dtype and {"flashinfer", "triton"} & set(backends):
        kept = str(runner.kv_cache_dtype).removeprefix("torch.")
        raise Refusal(
            f"{target} has scales for KV in FP8, and SGLang's backends flashinfer and triton also "
            f"multiply KV in {kept} by them.",
            "Leave --kv-cache-dtype out, or give --attention-backend fa3.",
        )
    if "flashinfer" in backends and not envs.SGLANG_FLASHINFER_USE_PAGED.get():
        raise Refusal(
            f"{target} has scales of its KV, and SGLang's flashinfer backend leaves them out when "
            "it prefills behind a cached prefix.",
            "Set SGLANG_FLASHINFER_USE_PAGED=1, or give --attention-backend fa3.",
        )


def _backends(server_args: ServerArgs) -> tuple[str, str]:
    """The target's attention backends for prefill and decode."""
    prefill, decode = server_args.get_attention_backends()
    return str(prefill), str(decode)


def _has_fp8_kv(model_config: ModelConfig) -> bool:
    """Whether SGLang will keep KV in FP8 for a ModelOpt checkpoint on this machine."""
    if not str(model_config.quantization).startswith("modelopt"):
        return False
    config = getattr(model_config.hf_config, "quantization_config", None)
    file = Path(model_config.model_path) / "hf_quant_config.json"
    if config is None and file.is_file():
        config = read_json(file.resolve())  # files of a target may be links
    if not isinstance(config, dict):
        return False
    nested = config.get("quantization")
    if isinstance(nested, dict):
        return str(nested.get("kv_cache_quant_algo")).upper() == "FP8"
    scheme = config.get("kv_cache_scheme")
    return isinstance(scheme, dict) and (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)


def _has_scales(model: torch.nn.Module) -> bool:
    """Whether K or V of a layer is divided by a scale other than 1 before it is stored."""
    for layer in model.modules():
        if isinstance(layer, RadixAttention):
            scales = layer.k_scale_float, layer.v_scale_float
            if any(scale not in (None, 1.0) for scale in scales):
                return True
    return False
