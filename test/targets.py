"""Small random targets of every class that runs on a CPU."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from test.checkpoints import EOS, HIDDEN, LAYERS, VOCAB, write_tokenizer

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": None,
}
HEADS = {"head_dim": 32}  # not hidden_size / num_attention_heads
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
GEMMA_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
}

TARGETS: dict[str, dict[str, Any]] = {  # SGLang's class -> config fields beyond SIZES
    "LlamaForCausalLM": HEADS,
    "MistralForCausalLM": HEADS | {"sliding_window": None},
    "Phi3ForCausalLM": {"num_key_value_heads": 4},
    "Qwen2ForCausalLM": {},
    "Qwen2MoeForCausalLM": EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 64},
    "Qwen3ForCausalLM": HEADS,
    "Qwen3MoeForCausalLM": HEADS | EXPERTS | {"num_experts": 4, "norm_topk_prob": True},
    "Gemma3ForCausalLM": HEADS
    | {"sliding_window": 16, "rope_parameters": GEMMA_ROPE, "initializer_range": 0.02},
    "Glm4MoeForCausalLM": HEADS | EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 1},
}
LATENT = {  # MLA: K and V of all heads are made from one latent vector per token
    "num_key_value_heads": 4,
    "head_dim": 16,  # of the part with RoPE, as Transformers names it
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "kv_lora_rank": 32,
    "q_lora_rank": 40,
}
SHARED = EXPERTS | {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
TARGETS |= {
    "DeepseekV3ForCausalLM": LATENT
    | SHARED
    | {"n_group": 2, "topk_group": 1, "rope_parameters": YARN},
    # Transformers leaves YaRN's factor out of V2's softmax, and the vector of queries is optional.
    "DeepseekV2ForCausalLM": LATENT | SHARED | {"n_group": 1, "topk_group": 1, "q_lora_rank": None},
    "Glm4MoeLiteForCausalLM": LATENT | SHARED,
}
MROPE = {"rope_type": "default", "rope_theta": 10_000.0}
GDN = HEADS | {  # every second layer keeps a recurrent state
    "layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
MANY_EXPERTS = EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 32}
HALF = {"partial_rotary_factor": 0.5}
TARGETS["Qwen3NextForCausalLM"] = (
    GDN | MANY_EXPERTS | HALF | {"norm_topk_prob": True, "rope_theta": 10_000.0}
)
VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
VISION |= {"out_hidden_size": HIDDEN}
HYBRIDS = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
INTERVAL = {"full_attention_interval": 2}  # SGLang reads it instead of `layer_types`
ROUTED = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
UNSAVED: dict[str, dict[str, Any]] = {  # fields that SGLang reads and Transformers does not save
    **dict.fromkeys(HYBRIDS, INTERVAL),
    "DeepseekV3ForCausalLM": ROUTED,
    "DeepseekV2ForCausalLM": ROUTED | {"topk_method": "greedy", "scoring_func": "softmax"},
}
IMAGE_TOKENS = {  # fields of the config, and the texts that Qwen's processors look for
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
MULTIMODAL: dict[str, dict[str, Any]] = {  # the text part matters; only text is compared
    "Qwen2_5_VLForConditionalGeneration": {
        "text_config": SIZES | {"rope_parameters": MROPE | {"mrope_section": [2, 3, 3]}},
        "vision_config": VISION | {"fullatt_block_indexes": [0]},
    },
    "Qwen3VLForConditionalGeneration": {
        "text_config": SIZES
        | HEADS
        | {"rope_parameters": MROPE | {"mrope_section": [4, 6, 6], "mrope_interleaved": True}},
        "vision_config": VISION | {"deepstack_visual_indexes": [0]},
    },
}
INTERLEAVED = MROPE | HALF | {"mrope_section": [2, 3, 3], "mrope_interleaved": True}
for experts, kind in ((MANY_EXPERTS, "Moe"), ({}, "")):
    MULTIMODAL[f"Qwen3_5{kind}ForConditionalGeneration"] = {
        "text_config": SIZES | GDN | HALF | experts | {"rope_parameters": INTERLEAVED},
        "vision_config": VISION,
    }
KIMI = "KimiK25ForConditionalGeneration"  # DeepSeek V3 behind a vision tower; not in Transformers
KIMI_VISION = {
    "patch_size": 4,
    "hidden_size": 32,
    "vt_hidden_size": 32,
    "mm_hidden_size": 32,
    "text_hidden_size": HIDDEN,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
}


def config_of(architecture: str) -> Any:
    config_class = getattr(transformers, architecture).config_class
    if architecture in TARGETS:
        return config_class(**SIZES | TARGETS[architecture])
    tokens = {name: VOCAB - 9 + i for i, name in enumerate(IMAGE_TOKENS)}
    return config_class(**MULTIMODAL[architecture], **tokens, tie_word_embeddings=False)


def write(folder: Path, architecture: str) -> Any:
    """Write a small random target of this class, and return Transformers' model of it."""
    if architecture == KIMI:
        return write_kimi(folder)
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(config_of(architecture)).float().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:  # Transformers starts them at 0 or 1
            parameter.data += 0.1 * torch.randn_like(parameter)
        if name.endswith("A_log"):  # of a state that lasts for some tokens
            parameter.data = torch.rand_like(parameter) * 2 - 2
    model.save_pretrained(folder)
    texts = enumerate(IMAGE_TOKENS.values(), VOCAB - 9)
    write_tokenizer(folder, VOCAB, dict(texts) if architecture in MULTIMODAL else None)
    if architecture in UNSAVED:
        name_unsaved(folder, UNSAVED[architecture])
    if architecture in MULTIMODAL:
        write_processor(folder, architecture.removesuffix("ForConditionalGeneration"))
    return model


def save_config(folder: Path, architecture: str, config: Any) -> str:
    """Write a target without weights."""
    config.architectures = [architecture]
    config.save_pretrained(folder)
    write_tokenizer(folder, VOCAB)
    return str(folder)


def name_unsaved(folder: Path, fields: dict[str, Any]) -> None:
    """Write fields of the text part into config.json."""
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config).update(fields)
    config.setdefault("rope_theta", 10_000.0)
    if "vision_config" in config:  # as published checkpoints say
        config["vision_config"]["deepstack_visual_indexes"] = []
    (folder / "config.json").write_text(json.dumps(config))


def write_kimi(folder: Path) -> Any:
    """Write a Kimi K2.5 without weights of its vision, and return the model of its text part."""
    model = write(folder, "DeepseekV3ForCausalLM")
    file = folder / "config.json"
    text = json.loads(file.read_text())
    whole: dict[str, Any] = {"architectures": [KIMI], "model_type": "kimi_k25", "dtype": "float32"}
    whole |= {"media_placeholder_token_id": VOCAB - 9}
    file.write_text(json.dumps(whole | {"text_config": text, "vision_config": KIMI_VISION}))
    weights = load_file(folder / "model.safetensors")
    named = {f"language_model.{name}": weight for name, weight in weights.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    return model


def write_processor(folder: Path, family: str) -> None:
    """Write a processor of small images. SGLang reads one at startup."""
    if family.startswith("Qwen3_5"):  # has no processor of its own
        family = "Qwen3VL"
    video = "Qwen3VLVideoProcessor" if family == "Qwen3VL" else "Qwen2VLVideoProcessor"
    getattr(transformers, f"{family}Processor")(
        image_processor=transformers.Qwen2VLImageProcessor(
            patch_size=16, min_pixels=32 * 32, max_pixels=256 * 256
        ),
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
        video_processor=getattr(transformers, video)(),
    ).save_pretrained(folder)


def write_modelopt(folder: Path, scale: float, **changes: Any) -> str:
    """A Llama as ModelOpt exports it, with scales of K and V, and no quantised weight."""
    torch.manual_seed(0)
    scheme = {"type": "float", "num_bits": 8, "dynamic": False}
    said: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*"]}
    said["kv_cache_scheme"] = scheme
    config = transformers.LlamaConfig(**SIZES | HEADS | changes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder, VOCAB)
    config_file, weights_file = folder / "config.json", folder / "model.safetensors"
    raw = json.loads(config_file.read_text())
    config_file.write_text(json.dumps(raw | {"quantization_config": said}))
    weights = load_file(weights_file)
    for i, kind in product(range(LAYERS), "kv"):
        weights[f"model.layers.{i}.self_attn.{kind}_proj.{kind}_scale"] = torch.tensor(scale)
    save_file(weights, weights_file, metadata={"format": "pt"})
    return str(folder)
