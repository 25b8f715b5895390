"""Rotary embeddings of the draft: Transformers' own tables, for the served length."""

from __future__ import annotations

import torch
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from sglang_dflash.checkpoint.config import DFlashConfig, Rope

FIRST_POSITIONS = 4096  # in a new table


class DraftRotary(RotaryEmbedding):
    """SGLang's rotation over Transformers' tables, which drafts are trained on.

    SGLang's own YaRN ignores `attention_factor` and `mscale`. If SGLang extends the tables of a
    scaled RoPE for a longer context, the new entries are not scaled.
    """

    def __init__(self, config: DFlashConfig, rope: Rope) -> None:
        described = Qwen3Config(
            head_dim=config.head_dim,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_heads,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": rope.theta}
            | (rope.scaling or {}),
        )
        tables = Qwen3RotaryEmbedding(described)
        # In a tuple, because a module takes no tensor before it is made.
        self._scaled = tables.inv_freq.float(), float(tables.attention_scaling)
        dim = config.head_dim
        dtype = torch.get_default_dtype()
        # A config may state any length. SGLang asks for the served one when the model is loaded.
        length = min(config.max_position_embeddings, FIRST_POSITIONS)
        super().__init__(dim, dim, length, int(rope.theta), True, dtype)

    cos_sin_cache: Tensor  # [positions, D]

    def _compute_cos_sin_cache(self) -> Tensor:
        return self._table(self.max_position_embeddings)

    def _ensure_cos_sin_cache_length(self, needed_max_pos: int) -> None:
        """Called by SGLang with the last position of the served length."""
        old = self.cos_sin_cache
        if needed_max_pos >= len(old):
            self.cos_sin_cache = self._table(needed_max_pos + 1).to(old.device, old.dtype)

    def _table(self, length: int) -> Tensor:
        """[length, D] float32, cosines first."""
        frequencies, factor = self._scaled  # [D / 2]
        at = torch.arange(length, dtype=torch.float32, device=frequencies.device)
        angles = torch.outer(at, frequencies)
        return torch.cat([angles.cos(), angles.sin()], dim=1) * factor


def rotary_embeddings(config: DFlashConfig) -> list[DraftRotary]:
    """One per layer. Layers with the same RoPE share one."""
    distinct = {str(rope): rope for rope in config.rope}
    made = {key: DraftRotary(config, rope) for key, rope in distinct.items()}
    return [made[str(rope)] for rope in config.rope]
