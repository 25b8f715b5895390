"""Each key of a draft's config is read, known to change nothing, or refused by its name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3MoeConfig

from sglang_dflash.checkpoint import load_config, read_draft
from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.checkpoint.fit import defects
from sglang_dflash.checkpoint.known_keys import TRAINING
from sglang_dflash.checkpoint.tensors import check_values
from sglang_dflash.errors import Refusal
from sglang_dflash.tools.cli import main
from sglang_dflash.tools.inspect import inspect
from test.checkpoints import HIDDEN, VOCAB, draft_config, draft_weights, write_draft
from test.formats import CASES, write

Config = dict[str, Any]


def read(folder: Path, config: Config) -> DFlashConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return load_config(folder)


def refusal(folder: Path, config: Config) -> str:
    with pytest.raises(Refusal) as refused:
        read(folder, config)
    return refused.value.what


def config_of(case: str) -> Config:
    return CASES[case]()[0]


def at_top(case: str) -> Callable[[Config], Config]:
    return lambda fields: config_of(case) | fields


def inside(case: str, section: str) -> Callable[[Config], Config]:
    """A config of this case with other fields in one of its sections."""

    def config(fields: Config) -> Config:
        found = config_of(case)
        return found | {section: found.get(section, {}) | fields}

    return config


def of_layer_type(fields: Config) -> Config:
    """A config with other fields in the RoPE of each layer type."""
    rope = {"rope_theta": 10_000.0} | fields
    types = {"sliding_attention": rope, "full_attention": rope}
    return config_of("zlab rope by layer type") | {"rope_parameters": types}


# A place of a config, by a function that puts fields there.
PLACES: dict[str, Callable[[Config], Config]] = {
    "zlab": at_top("zlab"),
    "zlab dflash_config": inside("zlab", "dflash_config"),
    "NeMo": at_top("NeMo"),
    "NeMo dflash_config": inside("NeMo", "dflash_config"),
    "DeepSpec": at_top("DeepSpec vanilla"),
    "SpecForge DSpark": at_top("SpecForge DSpark"),
    "SpecForge DSpark dflash_config": inside("SpecForge DSpark", "dflash_config"),
    "SpecForge DSpark dspark_config": inside("SpecForge DSpark", "dspark_config"),
    "DFlash 2": at_top("DFlash 2"),
    "DFlash 2 dflash_config": inside("DFlash 2", "dflash_config"),
    "DSpine": at_top("DSpine"),
    "DSpine dflash_config": inside("DSpine", "dflash_config"),
    "LiLiCorr": at_top("LiLiCorr"),
    "LiLiCorr dflash_config": inside("LiLiCorr", "dflash_config"),
    "Domino": at_top("Domino"),
    "Domino dflash_config": inside("Domino", "dflash_config"),
    "speculators": at_top("speculators"),
    "speculators body": inside("speculators", "transformer_layer_config"),
    "speculators DSpark": at_top("speculators DSpark"),
    "speculators DSpark body": inside("speculators DSpark", "transformer_layer_config"),
    "speculators DFlash 2": at_top("speculators DFlash 2"),
    "speculators DFlash 2 body": inside("speculators DFlash 2", "transformer_layer_config"),
    "RoPE": inside("zlab yarn in rope_parameters", "rope_parameters"),
    "RoPE by layer type": of_layer_type,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "fields",
    [
        {"use_gate": True},
        {"use_gate": False},
        {"new_thing": 1},
        {"embed_mode": "mean"},
        {"hidden_dim_adapter": True},
        {"conditioning_source": "features", "target_kv_heads": 4},
    ],
    ids=str,
)
def test_unknown_keys_are_refused_by_name(tmp_path: Path, place: str, fields: Config) -> None:
    what = refusal(tmp_path, PLACES[place](fields))
    assert "keys that are not known" in what
    for key in fields:
        assert key in what
    assert read(tmp_path, PLACES[place](dict.fromkeys(fields))) == read(
        tmp_path, PLACES[place]({})
    )  # null is absent


# Fields that are read in another place or of another family.
MISPLACED: dict[str, tuple[str, Config]] = {
    "sliding_window": ("zlab dflash_config", {"sliding_window": 8}),
    "layer_types": ("speculators", {"layer_types": ["sliding_attention"] * 2}),
    "sliding_window of speculators": ("speculators", {"sliding_window": 8}),
    "sliding_window_non_causal": ("zlab", {"sliding_window_non_causal": True}),
    "block_size": ("speculators body", {"block_size": 4}),
    "shift_label": ("zlab dflash_config", {"shift_label": True}),
    "pure_draft_prefix_len": ("zlab", {"pure_draft_prefix_len": 1}),
    "confidence_head_alpha": ("DFlash 2", {"confidence_head_alpha": 1.0}),
    "input_embedding_scale": ("speculators", {"input_embedding_scale": 2.0}),
    "final_logit_softcapping": ("speculators DSpark", {"final_logit_softcapping": 30.0}),
    "dspark_config": ("zlab", {"dspark_config": {"markov_rank": 4}}),
    "dflash_config": ("speculators", {"dflash_config": {"causal": True}}),
    "text_config": ("zlab", {"text_config": {"hidden_size": 64}}),
    "query_pre_attn_scalar": ("zlab", {"query_pre_attn_scalar": 256}),
    "dflash2_selector_search_mode": ("speculators", {"dflash2_selector_search_mode": "global"}),
    "rope_dim of yarn": ("RoPE", {"rope_dim": 16}),
}


@pytest.mark.parametrize("key", MISPLACED)
def test_keys_that_a_format_does_not_read_are_refused(tmp_path: Path, key: str) -> None:
    place, fields = MISPLACED[key]
    assert next(iter(fields)) in refusal(tmp_path, PLACES[place](fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"use_qk_norm": False},
        {"qk_norm": False},
        {"mlp_bias": True},
        {"rope_is_neox_style": False},
        {"attention_sink_bias": True},
        {"is_encoder_decoder": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("place", [place for place in PLACES if "RoPE" not in place])
def test_other_layers_are_refused_in_each_place(tmp_path: Path, place: str, fields: Config) -> None:
    [(key, value)] = fields.items()
    assert f"has {key} = {value}" in refusal(tmp_path, PLACES[place](fields))
    assert read(tmp_path, PLACES[place]({key: not value})) == read(tmp_path, PLACES[place]({}))


def test_the_place_that_is_served_does_not_hide_the_other(tmp_path: Path) -> None:
    config = draft_config(dflash_config={"attention_sink_bias": False}, attention_sink_bias=True)
    assert "attention_sink_bias = True" in refusal(tmp_path, config)


def test_an_adapter_of_the_hidden_size_is_refused(tmp_path: Path) -> None:
    """JetSpec's. At the top level, the size is the width of what `fc` reads."""
    same = draft_config(dflash_config={"target_hidden_size": HIDDEN})
    assert read(tmp_path, same) == read(tmp_path, draft_config())
    other = draft_config(dflash_config={"target_hidden_size": 2 * HIDDEN})
    assert f"target_hidden_size = {2 * HIDDEN}" in refusal(tmp_path, other)


@pytest.mark.parametrize("place", [place for place in PLACES if "RoPE" not in place])
def test_keys_of_training_change_nothing(tmp_path: Path, place: str) -> None:
    fields: Config = dict.fromkeys(TRAINING, 1) | {"training_mode": "vp_drafter"}
    assert read(tmp_path, PLACES[place](fields)) == read(tmp_path, PLACES[place]({}))


METHODS: dict[str, Config] = {
    "XPress (a head refines the block in several passes)": {"xpress_rank": 64},
    "H-Spec (mamba layers beside attention to the target's own KV)": {"hspec_config": {"x": 1}},
    "DSpark on the target's KV": {"conditioning_source": "target_kv"},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("place", ["zlab", "zlab dflash_config", "SpecForge DSpark"])
def test_methods_that_are_not_served_are_named(tmp_path: Path, place: str, method: str) -> None:
    assert f"a draft of {method}" in refusal(tmp_path, PLACES[place](METHODS[method]))


SPELLINGS = ("causal", "is_causal", "causal_head")
EITHER_WAY = [place for place in PLACES if not place.startswith(("RoPE", "DSpine"))]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("key", SPELLINGS)
@pytest.mark.parametrize("place", EITHER_WAY)
def test_direction_is_read_by_any_name(tmp_path: Path, place: str, key: str, causal: bool) -> None:
    config = PLACES[place]({key: causal})
    if "DFlash 2" in place and "speculators" in place:
        config["sliding_window_non_causal"] = not causal
    assert [view.causal for view in read(tmp_path, config).attention] == [causal] * 2


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("other", SPELLINGS)
@pytest.mark.parametrize("key", SPELLINGS)
def test_two_directions_must_agree(tmp_path: Path, key: str, other: str, value: bool) -> None:
    """In one section, or one of them at the top level."""
    apart = draft_config(dflash_config={key: value}, **{other: not value})
    what = refusal(tmp_path, apart)
    assert f"{other} = {not value}" in what
    assert f"{key} = {value} in its dflash_config" in what
    if key != other:
        beside = draft_config(dflash_config={key: value, other: not value})
        assert f"{other} = {not value} in its dflash_config" in refusal(tmp_path, beside)
    agreed = draft_config(dflash_config={key: value}, **{other: value})
    assert [view.causal for view in read(tmp_path, agreed).attention] == [value] * 2


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("place", ["speculators", "speculators body"])
def test_directions_of_speculators_must_agree(tmp_path: Path, place: str, value: bool) -> None:
    fields = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 12}
    config = PLACES[place]({"is_causal": value})
    config["transformer_layer_config"] |= fields
    config["sliding_window_non_causal"] = value
    assert f"sliding_window_non_causal = {value}" in refusal(tmp_path, config)
    config["sliding_window_non_causal"] = not value
    assert [view.causal for view in read(tmp_path, config).attention] == [value] * 2


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
# Two statements of one thing, in a config of this case.
CONTRADICTIONS: dict[str, tuple[str, Config, Config]] = {
    "block_size": ("zlab", {}, {"block_size": 16}),
    "mask_token_id": ("zlab", {"mask_token_id": 149}, {}),
    "target_layer_ids": ("zlab", {"target_layer_ids": [0, 1]}, {}),
    "num_target_layers": ("zlab", {}, {"num_target_layers": 8}),
    "sample_from_anchor": ("zlab", {"sample_from_anchor": False}, {"sample_from_anchor": True}),
    "output_multiplier": ("zlab", {"output_multiplier": 2.0}, {"output_multiplier": 1.0}),
    "final_logit_softcapping": (
        "zlab",
        {"final_logit_softcapping": 30.0},
        {"final_logit_softcapping": 20.0},
    ),
    "input_embedding_scale": (
        "zlab",
        {"input_embedding_scale": 8.0},
        {"input_embedding_scale": 4.0},
    ),
    "use_swa": ("zlab sliding", {"use_swa": False}, {"use_swa": True}),
    "swa_window_size": ("zlab sliding", {}, {"use_swa": True, "swa_window_size": 10}),
    "projector_type": ("zlab", {"projector_type": "dspark"}, {"projector_type": "dflash"}),
    "markov_rank": ("SpecForge DSpark", {"markov_rank": 8}, {}),
    "selector_top_k": ("DFlash 2", {"selector_top_k": 16}, {}),
    "conv_kernel_size": ("DFlash 2", {"conv_kernel_size": 2}, {}),
    "gru_hidden_dim": ("Domino", {"gru_hidden_dim": 8}, {}),
    "rope_theta": ("zlab", {"rope_parameters": {"rope_theta": 500.0}}, {}),
    "rope_scaling": (
        "zlab",
        {"rope_parameters": YARN, "rope_scaling": YARN | {"factor": 2.0}},
        {},
    ),
    "rope_type": ("zlab", {"rope_scaling": YARN | {"type": "linear"}}, {}),
    "rope_scaling beside types": ("zlab rope by layer type", {"rope_scaling": YARN}, {}),
}


@pytest.mark.parametrize("key", CONTRADICTIONS)
def test_contradictions_are_refused(tmp_path: Path, key: str) -> None:
    case, top, method = CONTRADICTIONS[key]
    config = config_of(case) | top
    config["dflash_config"] = config["dflash_config"] | method
    assert key.split()[0] in refusal(tmp_path, config)


def test_a_contradiction_of_dspark_config(tmp_path: Path) -> None:
    config = PLACES["SpecForge DSpark dspark_config"]({"markov_rank": 8})
    assert "markov_rank = 16, but 8 in its dspark_config" in refusal(tmp_path, config)


def test_equal_statements_agree(tmp_path: Path) -> None:
    """SpecForge and Transformers state RoPE twice, ModelOpt the block size."""
    config = draft_config(dflash_config={"block_size": 8})
    plain = read(tmp_path, config)
    twice = {"rope_parameters": {"rope_theta": 10_000.0}, "rope_scaling": {"rope_type": "default"}}
    assert read(tmp_path, config | twice) == plain
    mrope = {"type": "mrope", "rope_type": "default", "mrope_section": [8, 4, 4]}
    assert read(tmp_path, config | {"rope_scaling": mrope}) == plain
    yarn = {"rope_parameters": YARN | {"rope_theta": 10_000.0}, "rope_scaling": YARN}
    found = read(tmp_path, config | yarn | {"rope_theta": None})
    assert found == read(tmp_path, config | {"rope_scaling": YARN | {"type": "yarn"}})


@pytest.mark.parametrize("place", ["zlab", "zlab dflash_config"])
def test_windows_of_all_layers_in_either_place(tmp_path: Path, place: str) -> None:
    config = PLACES[place]({"use_swa": True, "swa_window_size": 10})
    assert [view.window for view in read(tmp_path, config).attention] == [10, 10]


def test_a_reduced_vocabulary_has_a_head(tmp_path: Path) -> None:
    config = draft_config(draft_vocab_size=64)
    weights = draft_weights(config)
    with pytest.raises(Refusal, match="draft_vocab_size = 64 of 160"):
        read_draft(write_draft(tmp_path / "without", config, weights))
    weights["lm_head.weight"] = torch.zeros(64, HIDDEN)
    assert read_draft(write_draft(tmp_path / "with", config, weights))[0].draft_vocab_size == 64
    config["draft_vocab_size"] = VOCAB
    with pytest.raises(Refusal, match="draft_vocab_size = 160 of 160"):
        read_draft(write_draft(tmp_path / "other", config, weights))


QWEN3_8B: Config = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": 16,
    "bos_token_id": 151643,
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
IDS = {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
DSPARK = {
    "attention_mode": "gqa",
    "confidence_head_alpha": 1.0,
    "confidence_head_with_markov": True,
    "enable_confidence_head": True,
    "markov_head_type": "vanilla",
    "markov_rank": 256,
    "projector_type": "dspark",
}
SLIDING_2048: Config = {
    "layer_types": ["sliding_attention"] * 5,
    "sliding_window": 2048,
    "use_sliding_window": True,
}
THETA = {"rope_theta": None, "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}}
OF_SPECULATORS: Config = {
    "auto_map": {"": "config.DFlashSpeculatorConfig"},
    "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
    "block_size": 8,
    "draft_vocab_size": 151936,
    "dtype": "bfloat16",
    "mask_token_id": 151669,
    "max_anchors": 3072,
    "speculators_config": {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
        "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"},
    },
    "speculators_version": "0.9.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": {
        key: value
        for key, value in QWEN3_8B.items()
        if key not in ("block_size", "dtype", "num_target_layers", "transformers_version")
    },
    "transformers_version": "5.8.1",
}
# Fields as they stand in configs of hubs and in those that trainers ship and write.
PUBLISHED: dict[str, Config] = {
    "z-lab, Qwen3-8B-DFlash-b16": {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "dflash_config": IDS,
    },
    "z-lab, later: all fields of the method inside": {
        "architectures": ["DFlashDraftModel"],
        "block_size": None,
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "sliding_window": 4096,
        "use_sliding_window": True,
        "dflash_config": IDS | {"block_size": 16, "num_target_layers": 36},
    }
    | THETA,
    "z-lab, gpt-oss": {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": True,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "dflash_config": IDS,
    },
    "z-lab, Gemma": {
        "architectures": ["DFlashDraftModel"],
        "final_logit_softcapping": 30.0,
        "dflash_config": IDS | {"final_logit_softcapping": 30.0, "input_embedding_scale": 64.0},
    },
    "z-lab, DFlash 2": {
        "architectures": ["DFlash2DraftModel"],
        "block_size": None,
        "is_causal": False,
        "pad_token_id": 151643,
        "transformers_version": "5.15.0",
        "dflash_config": IDS
        | {
            "block_size": 16,
            "conv_group_size": 16,
            "conv_kernel_size": 2,
            "final_logit_softcapping": 20.0,
            "output_multiplier": 0.196,
            "selector_rank": 256,
            "selector_top_k": 16,
        },
    }
    | SLIDING_2048
    | THETA,
    "SpecForge, DSpine": {
        "architectures": ["DSpineDraftModel"],
        "auto_map": {"AutoModel": "dspine.DSpineDraftModel"},
        "is_causal": True,
        "dflash_config": IDS,
        "dspine_config": {
            "transfer_rank": 1024,
            "message_size": 512,
            "top_k": 16,
            "ce_weight": 0.1,
            "alignment_weight": 0.5,
            "alignment_warmup_steps": 146,
            "replacement_layers": 3,
            "replacement_probability": 0.5,
            "replacement_hold_ratio": 1 / 6,
            "replacement_end_ratio": 1 / 3,
            "candidate_mass_threshold": 1e-4,
        },
    },
    "SpecForge, DTA": {
        "architectures": ["DFlashDraftModel"],
        "dflash_config": IDS | {"training_mode": "vp_drafter", "prefix_weight_base": 0.9},
    },
    "SpecForge, multimodal": {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3_vl_text",
        "rope_scaling": {
            "mrope_interleaved": True,
            "mrope_section": [24, 20, 20],
            "rope_type": "default",
        },
        "dflash_config": IDS,
    },
    "SpecForge, DSpark": {
        "architectures": ["DSparkDraftModel"],
        "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
        "target_hidden_size": None,
        "dflash_config": DSPARK | IDS,
    },
    "SpecForge, causal DSpark": {
        "architectures": ["DSparkDraftModel"],
        "is_causal": True,
        "dflash_config": DSPARK | IDS | {"enable_confidence_head": False},
    },
    "SpecForge, DSpark with YaRN": {
        "architectures": ["DSparkDraftModel"],
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 8192,
            "rope_theta": 1000000,
            "rope_type": "yarn",
        },
        "dflash_config": DSPARK | IDS,
    },
    "RadixArk, DSpark: fields of the head at both places": {
        "architectures": ["DSparkDraftModel"],
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "dflash_config": DSPARK | IDS,
    },
    "DeepSpec, DSpark": {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 7,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "num_anchors": 512,
    }
    | IDS,
    "DeepSpec, DFlash": {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 7,
        "enable_confidence_head": False,
        "markov_rank": 0,
        "num_anchors": 512,
    }
    | IDS,
    "SpecForge, Domino": {
        "architectures": ["DominoDraftModel"],
        "auto_map": {"AutoModel": "domino.DominoDraftModel"},
        "emb_dim": 256,
        "dflash_config": IDS
        | {
            "emb_dim": 256,
            "gru_hidden_dim": 1024,
            "projector_type": "domino",
            "pure_draft_prefix_len": 1,
            "shift_label": True,
        },
    },
    "ModelOpt": {
        "architectures": ["DFlashDraftModel"],
        "torch_dtype": "bfloat16",
        "dflash_config": IDS
        | {
            "block_size": 16,
            "causal": True,
            "attention_sink_bias": False,
            "use_swa": True,
            "swa_window_size": 1024,
        },
    },
    "ModelOpt, LiLiCorr": {
        "architectures": ["LiLiCorrDraftModel"],
        "dflash_config": IDS
        | {
            "projector_type": "lilicorr",
            "block_size": 16,
            "causal": False,
            "conv_kernel_size": 4,
            "conv_group_size": 16,
            "lilicorr_candidate_topk": 16,
            "lilicorr_hidden_size": 1024,
            "lilicorr_num_layers": 2,
            "lilicorr_num_heads": 8,
            "lilicorr_mlp_ratio": 2.0,
            "lilicorr_factor_dim": 128,
            "lilicorr_vector_eps": 1e-6,
            "lilicorr_logit_scale": 20.0,
        },
    },
    "JetSpec": {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "dflash_config": IDS | {"causal_head": True},
    }
    | THETA,
    "NeMo Automodel, JetSpec": {
        "architectures": ["Qwen3DFlashDraftModel"],
        "dflash_config": IDS | {"causal": True},
    },
    "NeMo Automodel, Domino": {
        "architectures": ["Qwen3DFlashDraftModel"],
        "dflash_config": IDS | {"emb_dim": 256, "gru_hidden_dim": 1024, "projector_type": "domino"},
    },
    "speculators, DFlash": OF_SPECULATORS
    | {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
    },
    "speculators, DSpark": OF_SPECULATORS
    | {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "confidence_head_with_markov": True,
        "enable_confidence_head": True,
        "markov_head_type": "vanilla",
        "markov_rank": 256,
        "sample_from_anchor": True,
        "sliding_window_non_causal": False,
        "use_aux_hidden_state": True,
    },
    "speculators, DFlash 2": OF_SPECULATORS
    | {
        "architectures": ["DFlash2DraftModel"],
        "speculators_model_type": "dflash2",
        "conv_group_size": 16,
        "conv_kernel_size": 2,
        "selector_rank": 256,
        "selector_top_k": 16,
        "sliding_window_non_causal": True,
        "transformer_layer_config": OF_SPECULATORS["transformer_layer_config"] | SLIDING_2048,
    },
}
CAUSAL = {
    *("SpecForge, causal DSpark", "SpecForge, DSpine", "ModelOpt", "JetSpec"),
    "NeMo Automodel, JetSpec",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_fields_are_read(tmp_path: Path, name: str) -> None:
    """What trainers write is not refused for a key."""
    fields = PUBLISHED[name]
    config = fields if "speculators_model_type" in fields else QWEN3_8B | fields
    found = read(tmp_path, config)
    assert found.mask_token_id == IDS["mask_token_id"]
    assert list(found.target_layer_ids) == IDS["target_layer_ids"]
    family = re.search(r"DSpark|DSpine|DFlash 2|Domino|LiLiCorr", name)
    if name != "DeepSpec, DFlash":
        assert found.family.name == (family[0] if family else "DFlash")
    if name in CAUSAL:
        assert all(view.causal for view in found.attention)


@pytest.mark.parametrize("target", [Qwen3Config, Qwen3MoeConfig])
def test_a_copy_of_the_targets_config(tmp_path: Path, target: type[Qwen3Config]) -> None:
    """NeMo Automodel and DeepSpec write the target's whole config, and their fields into it."""
    config = target(num_hidden_layers=2, head_dim=128).to_dict() | {
        "architectures": ["Qwen3DFlashDraftModel"],
        "block_size": 16,
        "dflash_config": IDS,
    }
    assert read(tmp_path, config).format == "zlab"


def test_inspect_reads_nemo_and_skips_tables_of_rope(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, weights, _ = CASES["NeMo JetSpec"]()
    path = write(tmp_path, config, weights)
    assert main(["inspect", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["family"], report["format"]) == ("DFlash", "zlab")
    assert report["parameters"] == sum(w.numel() for w in draft_weights(config).values())
    assert main(["inspect", str(path)]) == 0
    assert "full, causal" in capsys.readouterr().out


TABLES = (
    *("rotary_emb.inv_freq", "model.rotary_emb.inv_freq", "rotary_emb.original_inv_freq"),
    *("model.layers.1.self_attn.rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.cos_cached"),
    *("layers.0.self_attn.rotary_emb.sin_cached", "rotary_emb_local.inv_freq"),
)


@pytest.mark.parametrize(
    "case", ["zlab", "speculators", "DeepSpec vanilla", "DFlash 2", "DSpine", "LiLiCorr", "Domino"]
)
def test_tables_of_rope_are_no_weights(tmp_path: Path, case: str) -> None:
    config, weights, _ = CASES[case]()
    plain = write(tmp_path / "plain", config, dict(weights))
    tables = {name: torch.full([16], float("nan")) for name in TABLES}
    path = write(tmp_path / "tables", config, weights | tables)
    read_config, tensors = read_draft(path)
    assert defects(read_config, tensors, read_config.draft_width) == []
    assert tensors.found == read_draft(plain)[1].found
    check_values(path)


@pytest.mark.parametrize("name", ["rotary_emb.weight", "inv_freq", "model.rotary.inv_freq"])
def test_other_tensors_are_still_refused(tmp_path: Path, name: str) -> None:
    config, weights, _ = CASES["zlab"]()
    path = write(tmp_path, config, weights | {name: torch.zeros(16)})
    assert "unexpected" in inspect(str(path), None).problems[0].what
