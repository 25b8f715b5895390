"""The draft's configuration, resolved once from its checkpoint; nobody below parses anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DFlashConfig:
    """A DFlash draft as the worker sees it.

    `target_layer_ids` counts as z-lab does: k is the output of target layer k, which is
    Transformers' `hidden_states[k + 1]`.
    """

    path: str
    format: str  # adapter that read it, as in `checkpoint.FORMATS`
    block_size: int  # N the draft was trained with, anchor included
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # ascending
    num_target_layers: int | None  # None: the checkpoint does not say
    target_hidden_size: int

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    attention_bias: bool
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None  # as Transformers' rope_parameters without rope_theta

    def kv_bytes_per_token(self, itemsize: int = 2) -> int:
        """Bytes of draft KV that a token takes over all ranks, at `itemsize` bytes a value."""
        return 2 * itemsize * self.num_layers * self.num_kv_heads * self.head_dim

    def hf_config(self) -> dict[str, Any]:
        """Keyword arguments of a `Qwen3Config` that describes the draft to SGLang."""
        return {
            "architectures": ["DFlashDraftModel"],
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "attention_bias": self.attention_bias,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_parameters": {
                "rope_theta": self.rope_theta,
                **(self.rope_scaling or {"rope_type": "default"}),
            },
            "dtype": "bfloat16",
        }
