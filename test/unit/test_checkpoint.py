"""Reading a draft's configuration: every field from its right place, or a refusal that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.checkpoint import load_config
from sglang_dflash.checkpoint.fit import Target, misfits
from sglang_dflash.checkpoint.zlab import default_target_layer_ids
from sglang_dflash.config import LayerAttention, Rope
from sglang_dflash.errors import Refusal
from test.checkpoints import BLOCK, HIDDEN, LAYERS, MASK, VOCAB, draft_config


def write(folder: Path, config: Any) -> Path:
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "config.json").write_text(text)
    return folder


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    method = {k: v for k, v in config["dflash_config"].items() if k not in keys}
    return {k: v for k, v in config.items() if k not in keys} | {"dflash_config": method}


def test_zlab(tmp_path):
    config = load_config(write(tmp_path, draft_config()))
    assert (config.block_size, config.mask_token_id) == (BLOCK, MASK)
    assert config.target_layer_ids == (0, 2)
    assert config.num_target_layers == LAYERS
    assert config.rope == (Rope(10_000.0),) * 2
    assert config.attention == (LayerAttention(),) * 2
    assert config.kv_bytes_per_token() == 2 * 2 * 2 * 2 * 32
    assert not config.variable_block_size  # only where the checkpoint says so


@pytest.mark.parametrize("place", ["top", "dflash_config"])
def test_zlab_fields_in_either_place(tmp_path, place):
    fields = {"block_size": 5, "num_target_layers": 9, "mask_token_id": 11, "target_layer_ids": [1]}
    config = without(draft_config(), *fields)
    fields["variable_block_size"] = True
    if place == "top":
        config |= fields
    else:
        config["dflash_config"] |= fields
    got = load_config(write(tmp_path, config))
    assert (got.block_size, got.num_target_layers, got.mask_token_id) == (5, 9, 11)
    assert got.target_layer_ids == (1,)
    assert got.variable_block_size


def test_default_layer_ids():
    """The ids of published drafts follow from the formula."""
    assert default_target_layer_ids(36, 5) == [1, 9, 17, 25, 33]
    assert default_target_layer_ids(64, 5) == [1, 16, 31, 46, 61]
    assert default_target_layer_ids(36, 1) == [18]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_size": None}, "block_size"),
        ({"block_size": 0}, "block_size = 0"),
        ({"block_size": "16"}, "block_size = '16'"),
        ({"hidden_size": None}, "hidden_size"),
        ({"rope_theta": None}, "rope_theta"),
        ({"dflash_config": {"mask_token_id": None}}, "mask_token_id"),
        ({"dflash_config": {"mask_token_id": -1}}, "mask_token_id = -1"),
        ({"dflash_config": {"target_layer_ids": [3, 1]}}, "ascending"),
        ({"dflash_config": {"target_layer_ids": []}}, "ascending"),
        ({"dflash_config": {"target_layer_ids": [1, True]}}, "ascending"),
        ({"dflash_config": {"output_multiplier": -1.0}}, "output_multiplier = -1.0"),
        ({"dflash_config": {"final_logit_softcapping": 0}}, "final_logit_softcapping = 0"),
        ({"dflash_config": {"variable_block_size": 1}}, "variable_block_size = 1"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "no sliding_window"),
        ({"architectures": ["DeepseekDFlashDraftModel"]}, "DeepseekDFlashDraftModel"),
    ],
)
def test_bad_fields_are_named(tmp_path, change, words):
    with pytest.raises(Refusal, match=r"config\.json") as caught:
        load_config(write(tmp_path, draft_config(**change)))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "cannot be read as JSON"), ("[]", "not a JSON object"), ("{}", "no DFlash draft")],
)
def test_bad_files(tmp_path, text, words):
    with pytest.raises(Refusal, match=words):
        load_config(write(tmp_path, text))


def test_missing_folder_and_config(tmp_path):
    with pytest.raises(Refusal, match="not a folder"):
        load_config(tmp_path / "nowhere")
    with pytest.raises(Refusal, match="does not exist"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({"hidden_size": 32}, "hidden size"),
        ({"num_layers": 5}, "layers"),
        ({"vocab_size": 4000}, "vocabulary"),
        ({"vocab_size": MASK}, "mask_token_id"),
    ],
)
def test_misfits_are_found(tmp_path, target, words):
    draft = load_config(write(tmp_path, draft_config()))
    good = {"path": "t", "num_layers": LAYERS, "hidden_size": HIDDEN, "vocab_size": VOCAB}
    assert misfits(draft, Target(**good)) == []
    assert any(words in problem.what for problem in misfits(draft, Target(**good | target)))


def test_layer_beyond_the_target(tmp_path):
    config = without(draft_config(dflash_config={"target_layer_ids": [0, 4]}), "num_target_layers")
    draft = load_config(write(tmp_path, config))
    target = Target(path="t", num_layers=LAYERS, hidden_size=HIDDEN, vocab_size=VOCAB)
    assert [p.what for p in misfits(draft, target)] == [
        "target_layer_ids [4] lie beyond the target's layers 0..3."
    ]
