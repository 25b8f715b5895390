"""The dtype of the target's KV: refused where a verify would round otherwise than decoding."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.environ import envs
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.server_args import ServerArgs

from sglang_dflash.checkpoint.files import read_json
from sglang_dflash.errors import Rule, refuse
from sglang_dflash.settings.facts import Facts

FP8 = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}


@dataclass(frozen=True)
class KVFacts(Facts):
    """A server, and the dtype of its target's KV as a flag or the checkpoint asks for it."""

    kv_dtype: str

    @property
    def fp8(self) -> bool:
        return self.kv_dtype.startswith("fp8")

    @property
    def decodes_with_fa3(self) -> bool:
        return "fa3" in (self.prefill, self.decode)

    @property
    def for_fp8(self) -> str:
        """A backend that verifies with KV in this dtype."""
        return "flashinfer" if self.kv_dtype == "fp8_e5m2" else "fa3"


RULES: tuple[Rule[KVFacts], ...] = (
    Rule(
        "`--quantization-param-path` on CUDA",
        lambda f: f.args.quantization_param_path and not f.platform.scale_files,
        "The scales of --quantization-param-path do not work: SGLang divides K and V by them, but "
        "its attention backends cannot multiply by them.",
        "Use a checkpoint that holds the scales, or leave the flag out.",
    ),
    Rule(
        "KV in FP8 of targets with latent attention (MLA)",
        lambda f: f.fp8 and f.target.attention_arch == AttentionArch.MLA,
        "The target {f.args.model_path} uses latent attention (MLA), whose KV is not served in "
        "FP8.",
        "Give --kv-cache-dtype bfloat16.",
    ),
    Rule(
        "`--kv-cache-dtype fp8_e5m2` with fa3",
        lambda f: f.kv_dtype == "fp8_e5m2" and f.decodes_with_fa3,
        "The attention backend fa3 does not read KV in fp8_e5m2.",
        "Give --kv-cache-dtype fp8_e4m3, or --attention-backend flashinfer.",
    ),
    Rule(
        "KV in FP8 with `--dtype float16` and fa3",
        lambda f: f.fp8 and f.target.dtype == torch.float16 and f.decodes_with_fa3,
        "The target {f.args.model_path} computes in float16, but fa3 returns bfloat16 if KV is in "
        "FP8.",
        "Give --dtype bfloat16, or --attention-backend flashinfer.",
    ),
    Rule(
        "KV in FP8 with triton",
        lambda f: f.fp8 and "triton" in (f.verify, f.decode),
        "The attention backend triton cannot verify a block if KV is in FP8: its kernel for one "
        "token rounds queries and softmax to FP8, and its kernel for a block does not.",
        "Give --attention-backend {f.for_fp8}, or --kv-cache-dtype bfloat16.",
    ),
    Rule(
        "KV in FP8 with different backends for verify and decode",
        lambda f: f.fp8 and f.verify != f.decode,
        "Each attention backend rounds in its own way if KV is in FP8, so {f.verify} cannot verify "
        "for {f.decode}.",
        "Give --speculative-attention-mode decode.",
    ),
    Rule(
        "`--kv-cache-dtype` other than auto, fp8_e4m3, fp8_e5m2 with `--dtype float16`",
        lambda f: not f.fp8 and f.kv_dtype != "auto" and f.target.dtype == torch.float16,
        "The target {f.args.model_path} computes in float16, so its KV cannot be {f.kv_dtype}.",
        "Leave --kv-cache-dtype out, or give --dtype bfloat16.",
    ),
)
FP4 = Rule[ServerArgs](
    "`--kv-cache-dtype fp4_e2m1`",
    lambda args: args.kv_cache_dtype == "fp4_e2m1",
    "DFLASH does not work with --kv-cache-dtype fp4_e2m1: SGLang's kernels for it have not been "
    "compared between a token and a block.",
    "Give --kv-cache-dtype fp8_e4m3 or bfloat16.",
)


def refuse_fp4_kv(server_args: ServerArgs) -> None:
    """BEFORE `ServerArgs._handle_kv4_compatibility`: refuse KV in FP4.

    SGLang itself fails in an assertion there, whatever the algorithm.
    """
    refuse([FP4], server_args)


def check_kv(server_args: ServerArgs) -> None:
    """Raise `Refusal` for a dtype of the target's KV that cannot be served."""
    asked = server_args.kv_cache_dtype
    if asked == "auto" and _has_fp8_kv(server_args.get_model_config()):
        asked = "fp8_e4m3"
    refuse(RULES, KVFacts(server_args, asked))


@dataclass(frozen=True)
class ScaledFacts(Facts):
    """A server of a loaded target that has scales of its KV."""

    kept: torch.dtype  # of its KV
    computed: torch.dtype

    @property
    def kept_in(self) -> str:
        return str(self.kept).removeprefix("torch.")


LOADED_RULES: tuple[Rule[ScaledFacts], ...] = (
    Rule(
        "targets with scales for KV in FP8, and other KV, with flashinfer or triton",
        lambda f: f.kept == f.computed and {"flashinfer", "triton"} & {f.prefill, f.decode},
        "The target {f.args.model_path} has scales for KV in FP8, and SGLang's backends flashinfer "
        "and triton also multiply KV in {f.kept_in} by them.",
        "Leave --kv-cache-dtype out, or give --attention-backend fa3.",
    ),
    Rule(
        "targets with scales of their KV, with flashinfer",
        lambda f: (
            "flashinfer" in (f.prefill, f.decode) and not envs.SGLANG_FLASHINFER_USE_PAGED.get()
        ),
        "The target {f.args.model_path} has scales of its KV, and SGLang's flashinfer backend "
        "leaves them out when it prefills after a cached prefix.",
        "Set SGLANG_FLASHINFER_USE_PAGED=1, or give --attention-backend fa3.",
    ),
)


def check_loaded_kv(server_args: ServerArgs, runner: Any) -> None:
    """Raise `Refusal` if the KV of the loaded target cannot be served. runner: its ModelRunner.

    The rules are asked again: SGLang reads from the loaded model that KV is in FP8. Before, only
    checkpoints on this machine can be read.
    """
    asked = FP8.get(runner.kv_cache_dtype, server_args.kv_cache_dtype)
    refuse(RULES, KVFacts(server_args, asked))
    if _has_scales(runner.model):
        refuse(LOADED_RULES, ScaledFacts(server_args, runner.kv_cache_dtype, runner.dtype))


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
