"""The draft's cos and sin equal Transformers' at every served position."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from sglang_dflash.checkpoint import load_config
from sglang_dflash.model import rope
from sglang_dflash.model.rope import rotary_embeddings
from sglang_dflash.tiny import TARGET
from test import inprocess  # loads the plugin
from test.arguments import arguments
from test.checkpoints import BLOCK, draft_config, write_draft
from test.inprocess import InProcess

assert inprocess

SERVED = 700
THETA = {"rope_theta": 10_000.0}
YARN = THETA | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROPES = {
    "default": THETA | {"rope_type": "default"},
    "linear": THETA | {"rope_type": "linear", "factor": 2.0},
    "llama3": THETA
    | {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": YARN,
    "yarn of Kimi": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0},
    "yarn of gpt-oss": YARN | {"truncate": False},
    "yarn, factor given": YARN | {"attention_factor": 0.5},
}


@pytest.fixture(scope="module", autouse=True)
def server_args() -> None:
    set_global_server_args_for_scheduler(ServerArgs(model_path=str(TARGET)))


@pytest.mark.parametrize("kind", ROPES)
def test_tables(tmp_path: Path, kind: str) -> None:
    """Within `max_position_embeddings` (256) and beyond it."""
    config = draft_config(rope_theta=None, rope_parameters=ROPES[kind], max_position_embeddings=256)
    first, second = rotary_embeddings(load_config(write_draft(tmp_path, config, {})))
    assert first is second
    before = first.cos_sin_cache.clone()
    first._ensure_cos_sin_cache_length(SERVED - 1)
    reference = Qwen3RotaryEmbedding(
        Qwen3Config(
            head_dim=32,
            hidden_size=128,
            num_attention_heads=4,
            max_position_embeddings=256,
            rope_parameters=ROPES[kind],
        )
    )
    cos, sin = reference(torch.zeros(1), torch.arange(SERVED)[None])
    expected = torch.cat([cos[0, :, :16], sin[0, :, :16]], dim=1)
    torch.testing.assert_close(first.cos_sin_cache, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(before, expected[:256], atol=1e-6, rtol=0)


def test_layers_of_different_rope_have_their_own(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    ropes = {kind: THETA | {"rope_theta": 10.0**i} for i, kind in enumerate(kinds, start=3)}
    config = draft_config(rope_parameters=ropes, layer_types=kinds, sliding_window=12)
    first, second = rotary_embeddings(load_config(write_draft(tmp_path, config, {})))
    assert not torch.equal(first.cos_sin_cache, second.cos_sin_cache)


def test_tables_reach_the_served_length(
    target: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config may state any length, so tables begin short. A block may lie behind the context."""
    monkeypatch.setattr(rope, "FIRST_POSITIONS", 16)
    with InProcess(target, draft) as engine:
        length = engine.worker.model_config.context_len + 2 * BLOCK
        for layer in engine.worker.draft_model_runner.model.layers:
            assert len(layer.self_attn.rotary_emb.cos_sin_cache) >= length


def test_a_target_with_yarn(target: str, draft: str, caplog: pytest.LogCaptureFixture) -> None:
    """--json-model-override-args lengthens the target's context, and the draft's tables with it."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    longer = {"rope_scaling": yarn, "max_position_embeddings": 2048}
    override: dict[str, Any] = {"json_model_override_args": json.dumps(longer)}
    prompt = [3 + i % 150 for i in range(600)]  # beyond the 512 positions of both configs
    with caplog.at_level("INFO", "sglang_dflash.engine.server_args"):
        arguments(target, draft, **override)
    assert "The draft keeps the RoPE of its own config.json (theta 10000" in caplog.text
    with InProcess(target, **override) as engine:
        expected = engine.generate(prompt, max_new_tokens=24)
    with InProcess(target, draft, **override) as engine:
        assert engine.worker.model_config.context_len == 2048
        for layer in engine.worker.draft_model_runner.model.layers:
            assert len(layer.self_attn.rotary_emb.cos_sin_cache) >= 2048 + 2 * BLOCK
        assert engine.generate(prompt, max_new_tokens=24) == expected
