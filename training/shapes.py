"""Shapes of target and draft: the vocabulary, the length of a row, both configs."""

from __future__ import annotations

from typing import Any

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
END_OF_TEXT, IM_START, IM_END, MASK = range(4)
VOCAB = 2048
ROW = 512  # tokens of a packed training row
THETA = 1_000_000.0
MAX_POSITIONS = 16_384

TARGET_CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 10,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": MAX_POSITIONS,
    "rope_theta": THETA,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": END_OF_TEXT,
    "eos_token_id": IM_END,
}
HYBRID_CONFIG: dict[str, Any] = {  # of Qwen3-Next; `training.hybrid`
    **TARGET_CONFIG,
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "partial_rotary_factor": 1.0,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "num_experts": 2,  # all chosen
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 256,
}
DRAFT_CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 16,
    "num_target_layers": TARGET_CONFIG["num_hidden_layers"],
    "num_hidden_layers": 3,
    "hidden_size": TARGET_CONFIG["hidden_size"],
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": THETA,
    "rope_scaling": None,
    "max_position_embeddings": MAX_POSITIONS,
    "vocab_size": VOCAB,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "layer_types": ["full_attention"] * 3,
    "use_sliding_window": False,
    "sliding_window": None,
    "dflash_config": {
        "mask_token_id": MASK,
        "target_layer_ids": [1, 3, 5, 7, 8],
    },
}


def is_linear(layer: int, config: dict[str, Any] = HYBRID_CONFIG) -> bool:
    """True for a layer with a GDN, False for one with attention."""
    return bool((layer + 1) % config["full_attention_interval"])
