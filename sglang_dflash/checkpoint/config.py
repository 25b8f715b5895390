"""The configuration of a draft, read once from its checkpoint. Later modules parse nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

Shape = tuple[int, ...]
FULL, SLIDING = "full_attention", "sliding_attention"  # types of layers


@dataclass(frozen=True)
class LayerAttention:
    """Keys that a block position of one draft layer may attend to."""

    # In the block: the position itself and those before it. Else the whole block.
    causal: bool = False
    # Length in tokens of a sliding window. None: the whole context.
    window: int | None = None
    # The whole block has one window, which ends before the anchor. Else each position has its own,
    # which ends at the position and includes it.
    anchored: bool = False

    @property
    def left(self) -> int | None:
        """Tokens before a position that it may attend to, as backends count a window.

        Most backends give each position a window of its own. For them, an anchored window of W is
        that of the anchor, so position j misses the j farthest of W tokens. This changes drafts
        only, never the output.
        """
        if self.window is None:
            return None
        return self.window if self.anchored else self.window - 1


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of one draft layer."""

    theta: float
    scaling: dict[str, Any] | None = None  # Transformers' rope_parameters without rope_theta


@dataclass(frozen=True)
class Family:
    """What a family of drafts adds to DFlash. Nothing: this is DFlash itself.

    Others derive from it in `checkpoint.formats`, one file each. A file of `model.families` has
    their modules.
    """

    name: ClassVar[str] = "DFlash"  # the method, by its paper's name
    module: ClassVar[str] = "dflash"  # in `model.families`
    # Names of boolean tensors that a checkpoint may hold, and that must be true there.
    marks: ClassVar[tuple[str, ...]] = ()
    reads_head: ClassVar[bool] = False  # it reads rows of the LM head's weight as they are

    def shapes(self, draft: DFlashConfig) -> dict[str, Shape]:
        """Name and shape of each tensor that it adds to a draft."""
        return {}

    def shapes_in_layer(self, draft: DFlashConfig) -> dict[str, Shape]:
        """The same for each layer, without the layer's prefix."""
        return {}

    def parts(self) -> list[str]:
        """What it adds, in words."""
        return []


@dataclass(frozen=True)
class DFlashConfig:
    """A DFlash draft as the worker sees it.

    `target_layer_ids` counts as z-lab does: id k is the output of target layer k, which is
    Transformers' `hidden_states[k + 1]`.
    """

    path: str
    format: str  # adapter that read it, as in `checkpoint.FORMATS`
    # Positions that the draft reads at once in training: the anchor and masks. It is the
    # `block_size` of the checkpoint.
    draft_width: int
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
    vocab_size: int  # the target's
    rms_norm_eps: float
    attention_bias: bool
    max_position_embeddings: int
    attention: tuple[LayerAttention, ...]  # one per layer
    rope: tuple[Rope, ...]  # one per layer

    embedding_scale: float | None = None  # of raw embeddings, None: the target's own scale
    own_embedding: bool = False  # the checkpoint holds embed_tokens, else the target's is used
    draft_vocab_size: int | None = None  # rows of the checkpoint's own lm_head, None: the target's
    vocabulary_map: bool = False  # the checkpoint holds d2t
    mask_embedding: bool = False  # mask_embedding.pt is beside the config
    quantization: dict[str, Any] | None = None  # quantization_config of the checkpoint
    family: Family = Family()
    logit_multiplier: float = 1.0  # of the LM head's output, before a head adds to it
    logit_cap: float | None = None  # soft-capping after the multiplier

    @property
    def block_size(self) -> int:
        """Positions of a whole block as the target verifies it: the anchor and every draft."""
        return self.draft_width + self.sample_from_anchor

    def width_of(self, block_size: int) -> int:
        """Positions that the draft reads of a served block of this size.

        A draft that predicts from the anchor reads one position fewer than the target verifies.
        """
        return block_size - 1 if self.sample_from_anchor else block_size

    @property
    def first_drafting(self) -> int:
        """The first position that predicts a draft. Each one after it predicts one, too."""
        return 0 if self.sample_from_anchor else 1

    @property
    def columns(self) -> int:
        """Tokens that the draft's logits are of."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def quantization_method(self) -> str | None:
        """Method of the checkpoint's quantisation."""
        return (self.quantization or {}).get("quant_method")

    def kv_bytes_per_token(self, itemsize: int = 2) -> int:
        """Bytes of draft KV that a token takes over all ranks, at `itemsize` bytes per value."""
        return 2 * itemsize * self.num_layers * self.num_kv_heads * self.head_dim

    def hf_config(self) -> dict[str, Any]:
        """Keyword arguments of a `Qwen3Config` that describes the draft to SGLang.

        SGLang sizes its pools and picks the quantisation by it. The model is built from this class.
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
