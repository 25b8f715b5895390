"""Tiny targets of every kind that SGLang distinguishes on a GPU."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from test.checkpoints import HIDDEN, LAYERS, VOCAB, write_tokenizer
from test.rehearsal.serving import HEADS
from test.targets import GDN, GEMMA_ROPE, MANY_EXPERTS

SIZES = HEADS | {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {
    "num_key_value_heads": 2,
    "head_dim": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "kv_lora_rank": 64,
    "q_lora_rank": 32,
    "first_k_dense_replace": LAYERS,  # no expert
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "rope_theta": 10_000.0,
}
WINDOWS = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * 2}
ONE_HEAD = {"head_dim": 64}
EVERY_SECOND = {"full_attention_interval": 2}  # layer has attention
SINKS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "swiglu_limit": 7.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}


@dataclass(frozen=True)
class Kind:
    architecture: str  # the class of SGLang and Transformers
    fields: dict[str, Any] = field(default_factory=dict)  # of config.json, beyond SIZES
    modelopt: dict[str, Any] | None = None  # of ModelOpt's hf_quant_config.json


def _quantised(method: str, dtype: str, **options: Any) -> Kind:
    said = {"quant_method": method, **options}
    return Kind("Qwen3ForCausalLM", {"dtype": dtype, "quantization_config": said})


KINDS = {
    "dense": Kind("Qwen3ForCausalLM"),
    "MLA": Kind("DeepseekV3ForCausalLM", LATENT | EXPERTS),
    "GLM": Kind("Glm4MoeLiteForCausalLM", LATENT | EXPERTS),
    "MoE": Kind("Qwen3MoeForCausalLM", EXPERTS | {"num_experts": 4}),
    "sliding window": Kind("Gemma3ForCausalLM", WINDOWS | {"rope_parameters": GEMMA_ROPE}),
    "two KV pools": Kind("GptOssForCausalLM", WINDOWS | SINKS),
    "hybrid": Kind("Qwen3NextForCausalLM", GDN | MANY_EXPERTS | ONE_HEAD | EVERY_SECOND),
    "AWQ": _quantised("awq", "float16", bits=4, group_size=32, zero_point=True, version="gemm"),
    "GPTQ": _quantised("gptq", "float16", bits=4, group_size=32, desc_act=False, sym=True),
    "FP8": _quantised("fp8", "bfloat16", activation_scheme="dynamic", weight_block_size=[128, 128]),
    "ModelOpt": Kind("Qwen3ForCausalLM", modelopt={"kv_cache_quant_algo": None}),
    "FP8 KV": Kind("Qwen3ForCausalLM", modelopt={"kv_cache_quant_algo": "FP8"}),
}


def write_kind(folder: Path, name: str, weights: bool = False) -> str:
    """Write a target: its config, its tokenizer and, if a test loads them, random weights."""
    kind = KINDS[name]
    model_class = getattr(transformers, kind.architecture)
    config = model_class.config_class(**SIZES | {"dtype": "bfloat16"} | kind.fields)
    config.architectures = [kind.architecture]
    config.save_pretrained(folder)
    if weights:
        torch.manual_seed(0)
        model_class(config).to(torch.bfloat16).save_pretrained(folder)
    if kind.modelopt is not None:
        said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
        said["quantization"] |= kind.modelopt
        (folder / "hf_quant_config.json").write_text(json.dumps(said))
    write_tokenizer(folder, VOCAB)
    return str(folder)
