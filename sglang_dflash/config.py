"""The draft's configuration, resolved once from its checkpoint; nobody below parses anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LayerAttention:
    """What a block position of one draft layer may see."""

    causal: bool = False  # in the block: itself and what is before it, else the whole block
    window: int | None = None  # tokens of a sliding window, None: all of the context
    anchored: bool = False  # the window counts back from the anchor for the whole block (it ends
    # at the anchor, exclusive), else from each position for itself (and includes it)


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of one draft layer."""

    theta: float
    scaling: dict[str, Any] | None = None  # Transformers' rope_parameters without rope_theta


@dataclass(frozen=True)
class DFlashConfig:
    """A DFlash draft as the worker sees it.

    `target_layer_ids` counts as z-lab does: k is the output of target layer k, which is
    Transformers' `hidden_states[k + 1]`.
    """

    path: str
    format: str  # adapter that read it, as in `checkpoint.FORMATS`
    block_size: int  # the most tokens that the draft read at once in training, anchor included
    sample_from_anchor: bool  # position j predicts token j + 1, the anchor's position too
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
    vocab_size: int  # of the target
    rms_norm_eps: float
    attention_bias: bool
    max_position_embeddings: int
    attention: tuple[LayerAttention, ...]  # a layer each
    rope: tuple[Rope, ...]  # a layer each

    variable_block_size: bool = False  # trained on shorter blocks, too: fewer masks do no harm
    embedding_scale: float | None = None  # of raw token embeddings, None: as the target has them
    own_embedding: bool = False  # the checkpoint brings embed_tokens, else the target's serves
    draft_vocab_size: int | None = None  # rows of the checkpoint's own lm_head, None: the target's
    vocabulary_map: bool = False  # the checkpoint brings d2t
    mask_embedding: bool = False  # mask_embedding.pt lies beside the config
    quantization: dict[str, Any] | None = None  # quantization_config of the checkpoint

    @property
    def verify_width(self) -> int:
        """Tokens of a whole block as the target verifies it, anchor included."""
        return self.block_size + self.sample_from_anchor

    def kv_bytes_per_token(self, itemsize: int = 2) -> int:
        """Bytes of draft KV that a token takes over all ranks, at `itemsize` bytes a value."""
        return 2 * itemsize * self.num_layers * self.num_kv_heads * self.head_dim

    def hf_config(self) -> dict[str, Any]:
        """Keyword arguments of a `Qwen3Config` that describes the draft to SGLang.

        SGLang sizes pools and picks quantisation by it; the model is built from this class.
        """
        described = {
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
            "max_position_embeddings": 2**30,  # no bound: tables grow with the served length
            "rope_parameters": {"rope_theta": self.rope[0].theta, "rope_type": "default"},
            "dtype": "bfloat16",
        }
        if self.quantization is not None:
            described["quantization_config"] = self.quantization
        return described
