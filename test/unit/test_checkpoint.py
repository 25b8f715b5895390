"""Reading a draft's configuration: each field from its place, or a refusal that names the field."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dflash.checkpoint import load_config, read_draft, tensors
from sglang_dflash.checkpoint.config import LayerAttention, Rope
from sglang_dflash.checkpoint.fit import Target, misfits
from sglang_dflash.checkpoint.formats.dflash2 import Convolution, DFlash2, Selector
from sglang_dflash.checkpoint.formats.domino import Domino
from sglang_dflash.checkpoint.formats.dspark import Confidence, DSpark, Markov
from sglang_dflash.checkpoint.formats.dspine import DSpine
from sglang_dflash.checkpoint.formats.zlab import default_target_layer_ids
from sglang_dflash.checkpoint.mask_embedding import read_mask_embedding
from sglang_dflash.errors import Refusal
from test import formats
from test.checkpoints import BLOCK, HIDDEN, LAYERS, MASK, VOCAB, draft_config, speculators_draft


def write(folder: Path, config: Any) -> Path:
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "config.json").write_text(text)
    return folder


def whole_sentences(refusal: Refusal) -> bool:
    """Both halves begin with a capital letter and end with a full stop."""
    halves = (refusal.what, refusal.fix)
    return all(half[0].isupper() and half.endswith(".") and "\n" not in half for half in halves)


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    method = {k: v for k, v in config["dflash_config"].items() if k not in keys}
    return {k: v for k, v in config.items() if k not in keys} | {"dflash_config": method}


def test_a_refusal_has_two_sentences() -> None:
    refusal = Refusal("It is broken.", "Fetch it again.")
    again = pickle.loads(pickle.dumps(refusal))
    assert str(refusal) == str(again) == "It is broken. Fetch it again."
    assert (again.what, again.fix) == ("It is broken.", "Fetch it again.")


def test_zlab(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, draft_config()))
    assert (config.draft_width, config.block_size, config.mask_token_id) == (BLOCK, BLOCK, MASK)
    assert config.target_layer_ids == (0, 2)
    assert config.num_target_layers == LAYERS
    assert config.rope == (Rope(10_000.0),) * 2
    assert config.attention == (LayerAttention(),) * 2
    assert config.kv_bytes_per_token() == 2 * 2 * 2 * 2 * 32


@pytest.mark.parametrize("place", ["top", "dflash_config"])
def test_zlab_fields_in_either_place(tmp_path: Path, place: str) -> None:
    fields = {"block_size": 5, "num_target_layers": 9, "mask_token_id": 11, "target_layer_ids": [1]}
    config = without(draft_config(), *fields)
    if place == "top":
        config |= fields
    else:
        config["dflash_config"] |= fields
    got = load_config(write(tmp_path, config))
    assert (got.draft_width, got.num_target_layers, got.mask_token_id) == (5, 9, 11)
    assert got.target_layer_ids == (1,)


def test_a_block_is_one_longer_with_sample_from_anchor(tmp_path: Path) -> None:
    config = draft_config(dflash_config={"sample_from_anchor": True})
    got = load_config(write(tmp_path, config))
    assert (got.draft_width, got.block_size) == (BLOCK, BLOCK + 1)


def test_default_layer_ids() -> None:
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
        ({"block_size": 8.0}, "block_size = 8.0"),
        ({"block_size": float("nan")}, "block_size = nan"),
        ({"hidden_size": None}, "hidden_size"),
        ({"rope_theta": None}, "rope_theta"),
        ({"dflash_config": {"mask_token_id": None}}, "mask_token_id"),
        ({"dflash_config": {"mask_token_id": -1}}, "mask_token_id = -1"),
        ({"dflash_config": {"target_layer_ids": [3, 1]}}, "ascending"),
        ({"dflash_config": {"target_layer_ids": []}}, "ascending"),
        ({"dflash_config": {"target_layer_ids": [1, True]}}, "ascending"),
        ({"dflash_config": {"output_multiplier": -1.0}}, "output_multiplier = -1.0"),
        ({"dflash_config": {"final_logit_softcapping": 0}}, "final_logit_softcapping = 0"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "[1] = 'chunked_attention'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "no sliding_window"),
        ({"architectures": ["DeepseekDFlashDraftModel"]}, "DeepseekDFlashDraftModel"),
    ],
)
def test_bad_fields_are_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(Refusal, match=r"config\.json") as caught:
        load_config(write(tmp_path, draft_config(**change)))
    assert words in caught.value.what
    assert whole_sentences(caught.value)


DOMINO: dict[str, Any] = {"projector_type": "domino", "emb_dim": 16, "gru_hidden_dim": 24}


@pytest.mark.parametrize("place", ["top", "dflash_config", "both"])
@pytest.mark.parametrize("architecture", ["DominoDraftModel", "DFlashDraftModel"])
def test_domino_fields_in_either_place(tmp_path: Path, place: str, architecture: str) -> None:
    """The normaliser writes DFlashDraftModel, so the projector type counts."""
    fields = DOMINO | {"pure_draft_prefix_len": BLOCK - 1, "shift_label": True}
    top = {} if place == "dflash_config" else fields
    method = {} if place == "top" else fields
    config = draft_config(architectures=[architecture], dflash_config=method) | top
    got = load_config(write(tmp_path, config))
    assert (got.format, got.family.name, got.family) == (
        "domino",
        "Domino",
        Domino(emb_dim=16, gru_hidden_dim=24, pure_prefix=BLOCK - 1, shifted=True),
    )
    # N - 1 drafts, though the anchor's position predicts one
    assert (got.draft_width, got.block_size) == (BLOCK, BLOCK)


def test_domino_defaults(tmp_path: Path) -> None:
    """Those of SpecForge's class, which the architecture alone names."""
    sizes = {"emb_dim": 16, "gru_hidden_dim": 24}
    config = draft_config(architectures=["DominoDraftModel"], dflash_config=sizes)
    got = load_config(write(tmp_path, config))
    assert got.family == Domino(16, 24, pure_prefix=0, shifted=False)


@pytest.mark.parametrize(
    ("top", "method", "words"),
    [
        ({}, {"emb_dim": None}, "has no emb_dim"),
        ({}, {"gru_hidden_dim": None}, "has no gru_hidden_dim"),
        ({}, {"gru_hidden_dim": 0}, "gru_hidden_dim = 0"),
        ({}, {"shift_label": 1}, "shift_label = 1"),
        ({}, {"pure_draft_prefix_len": -1}, "pure_draft_prefix_len = -1"),
        ({}, {"pure_draft_prefix_len": BLOCK}, "must be less than block_size = 8"),
        ({}, {"sample_from_anchor": True}, "sample_from_anchor"),
        ({"emb_dim": 8}, {}, "emb_dim = 8, but 16"),
        ({"shift_label": False}, {"shift_label": True}, "shift_label = False, but True"),
        ({}, {"block_size": 16}, "block_size = 8, but 16"),
        ({"projector_type": "dflash"}, {}, "projector_type = 'dflash', but 'domino'"),
    ],
)
def test_bad_domino_fields_are_named(
    tmp_path: Path, top: dict[str, Any], method: dict[str, Any], words: str
) -> None:
    config = draft_config(dflash_config=DOMINO | method) | top
    with pytest.raises(Refusal, match=r"config\.json") as caught:
        load_config(write(tmp_path, config))
    assert words in caught.value.what
    assert whole_sentences(caught.value)


DFLASH2 = {
    "conv_kernel_size": 3,
    "conv_group_size": 8,
    "selector_rank": 16,
    "selector_top_k": 12,
}


@pytest.mark.parametrize("place", ["top", "dflash_config"])
def test_dflash2(tmp_path: Path, place: str) -> None:
    fields = DFLASH2 if place == "top" else {"dflash_config": DFLASH2}
    config = draft_config(architectures=["DFlash2DraftModel"], **fields)
    got = load_config(write(tmp_path, config))
    assert (got.family.name, got.format) == ("DFlash 2", "dflash2")
    assert got.family == DFlash2(Convolution(3, 8), Selector(16, 12))


def test_defaults_of_dflash2_in_speculators(tmp_path: Path) -> None:
    config, _ = speculators_draft(VOCAB, layer_types=["sliding_attention"] * 2, sliding_window=12)
    got = load_config(write(tmp_path, config | {"speculators_model_type": "dflash2"}))
    assert (got.family.name, got.format) == ("DFlash 2", "speculators")
    assert got.family == DFlash2(Convolution(2, 16), Selector(256, 16))
    assert got.attention == (LayerAttention(window=12, anchored=True),) * 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"conv_group_size": None}, "has conv_kernel_size but no conv_group_size"),
        ({"selector_rank": None}, "has selector_top_k but no selector_rank"),
        ({"conv_group_size": 24}, "conv_group_size = 24, which does not divide"),
        ({"conv_kernel_size": BLOCK + 1}, "more than block_size = 8"),
        ({"conv_kernel_size": 0}, "conv_kernel_size = 0"),
        ({"selector_top_k": VOCAB + 1}, "more than vocab_size = 160"),
        ({"selector_rank": True}, "selector_rank = True"),
        (dict.fromkeys(DFLASH2), "neither conv_kernel_size nor selector_rank"),
    ],
)
def test_bad_fields_of_dflash2_are_named(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    fields = {"dflash_config": DFLASH2 | change}
    config = draft_config(architectures=["DFlash2DraftModel"], **fields)
    with pytest.raises(Refusal, match=r"config\.json") as caught:
        load_config(write(tmp_path, config))
    assert words in caught.value.what
    assert whole_sentences(caught.value)


def test_dflash2_of_speculators_has_the_whole_vocabulary(tmp_path: Path) -> None:
    config, _ = speculators_draft(64)
    with pytest.raises(Refusal, match="has draft_vocab_size 64 of 160") as caught:
        load_config(write(tmp_path, config | {"speculators_model_type": "dflash2"}))
    assert whole_sentences(caught.value)


SIZES = {"transfer_rank": 24, "message_size": 20, "top_k": 12}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dspine_config": None}, "has no dspine_config"),
        ({"dspine_config": {"transfer_rank": 24}}, "has no message_size"),
        ({"dspine_config": SIZES | {"transfer_dim": 24}}, "not known"),
        ({"dspine_config": SIZES | {"top_k": 0}}, "top_k = 0"),
        ({"dspine_config": SIZES | {"top_k": 65}}, "top_k = 65"),
        ({"dspine_config": SIZES | {"transfer_rank": 65}}, "more than hidden_size = 64"),
        ({"vocab_size": 8}, "top_k = 12, which is more than vocab_size = 8"),
        ({"is_causal": False}, "says that blocks are not causal"),
        ({"sample_from_anchor": True}, "has sample_from_anchor"),
        ({"architectures": None, "config": {}}, "has no mask_token_id"),
    ],
    ids=str,
)
def test_bad_fields_of_dspine_are_named(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    config, _, _ = formats.dspine()
    with pytest.raises(Refusal, match=r"config\.json") as caught:
        load_config(write(tmp_path, config | changes))
    assert words in caught.value.what
    assert whole_sentences(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lilicorr_enabled": False}, "has lilicorr_enabled = False"),
        ({"lilicorr_factor_dim": None}, "has no lilicorr_factor_dim"),
        ({"lilicorr_candidate_topk": 17}, "lilicorr_candidate_topk = 17"),
        ({"lilicorr_num_heads": 5}, "does not divide the head's hidden size 32"),
        ({"lilicorr_logit_scale": 0.0}, "lilicorr_logit_scale = 0.0"),
        ({"lilicorr_dropout": 0.1}, "not known"),
        ({"conv_kernel_size": 3}, "has conv_kernel_size but no conv_group_size"),
        ({"sample_from_anchor": True}, "has sample_from_anchor"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"selector_rank": 16, "selector_top_k": 4}, "not known"),
    ],
    ids=str,
)
def test_bad_fields_of_lilicorr_are_named(
    tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    config, _, _ = formats.lilicorr(**fields)
    with pytest.raises(Refusal, match=r"config\.json") as caught:
        load_config(write(tmp_path, config))
    assert words in caught.value.what
    assert whole_sentences(caught.value)


def test_blocks_of_dspine_are_causal_if_they_do_not_say_so(tmp_path: Path) -> None:
    config, _, _ = formats.sliding_dspine()
    del config["is_causal"]
    got = load_config(write(tmp_path, config))
    assert got.attention == (LayerAttention(True, window=12), LayerAttention(True))


def test_tencents_form_needs_its_codes(tmp_path: Path) -> None:
    config, weights, _ = formats.dspine_of_tencent()
    path = formats.write(tmp_path / "draft", config, weights)
    assert load_config(path).family == DSpine(24, 20, 16)
    (path / "transfer.safetensors").unlink()
    with pytest.raises(Refusal, match=r"no tensor transfer_codes") as caught:
        load_config(path)
    assert whole_sentences(caught.value)


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        (torch.tensor(1.0), "transfer_ready has dtype F32, not a boolean one"),
        (torch.tensor([True]), "transfer_ready has shape [1], not []"),
    ],
)
def test_a_mark_that_is_none(tmp_path: Path, mark: torch.Tensor, words: str) -> None:
    config, weights, _ = formats.dspine()
    path = formats.write(tmp_path / "draft", config, weights | {"transfer_ready": mark})
    assert [words] == tensors.faults(*read_draft(path))


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_mark_that_is_false(tmp_path: Path, prefix: str) -> None:
    config, weights, _ = formats.dspine()
    weights[f"{prefix}transfer_ready"] = weights.pop("transfer_ready")
    path = formats.write(tmp_path / "draft", config, weights)
    marks = load_config(path).family.marks
    tensors.check_values(path, marks)
    weights[f"{prefix}transfer_ready"] = torch.tensor(False)
    formats.write(path, config, weights)
    with pytest.raises(Refusal, match="transfer_ready = false") as caught:
        tensors.check_values(path, marks)
    assert whole_sentences(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "cannot be read as JSON"), ("[]", "not a JSON object"), ("{}", "no DFlash draft")],
)
def test_bad_files(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(Refusal, match=words) as caught:
        load_config(write(tmp_path, text))
    assert whole_sentences(caught.value)


def test_missing_folder_and_config(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="not a folder"):
        load_config(tmp_path / "nowhere")
    with pytest.raises(Refusal, match="does not exist"):
        load_config(tmp_path)


BROKEN_MASKS: dict[str, Callable[[Path], object]] = {
    "text": lambda file: file.write_text("hello there"),
    "nothing": lambda file: file.write_text(""),
    "code": lambda file: torch.save(Path.home, file),
    "another size": lambda file: torch.save(torch.zeros(HIDDEN + 1), file),
    "another mask": lambda file: torch.save({"mask_token_id": 0, "mask": torch.zeros(1)}, file),
}


@pytest.mark.parametrize("how", BROKEN_MASKS)
def test_a_broken_mask_embedding_is_refused(tmp_path: Path, how: str) -> None:
    BROKEN_MASKS[how](tmp_path / "mask_embedding.pt")
    config = load_config(write(tmp_path, draft_config()))
    with pytest.raises(Refusal, match=r"mask_embedding\.pt") as caught:
        read_mask_embedding(config)
    assert whole_sentences(caught.value)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({"hidden_size": 32}, "hidden size"),
        ({"num_layers": 5}, "layers"),
        ({"vocab_size": 4000}, "vocabulary"),
        ({"vocab_size": MASK}, "mask_token_id"),
    ],
)
def test_misfits_are_found(tmp_path: Path, target: dict[str, Any], words: str) -> None:
    draft = load_config(write(tmp_path, draft_config()))
    good: dict[str, Any] = {
        "path": "t",
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
    }
    assert misfits(draft, Target(**good)) == []
    found = misfits(draft, Target(**good | target))
    assert any(words in refusal.what for refusal in found)
    assert all(map(whole_sentences, found))


def test_layer_beyond_the_target(tmp_path: Path) -> None:
    config = without(draft_config(dflash_config={"target_layer_ids": [0, 4]}), "num_target_layers")
    draft = load_config(write(tmp_path, config))
    target = Target(path="t", num_layers=LAYERS, hidden_size=HIDDEN, vocab_size=VOCAB)
    assert [refusal.what for refusal in misfits(draft, target)] == [
        "The target_layer_ids [4] lie beyond the target's layers 0..3."
    ]


DSPARK: dict[str, Any] = {"projector_type": "dspark", "markov_rank": 4}
WRONG_HEADS: dict[str, dict[str, Any]] = {
    "markov_rank = -1": {"markov_rank": -1},
    "markov_head_type = 'lstm'": {"markov_head_type": "lstm"},
    "enable_confidence_head = 'yes'": {"enable_confidence_head": "yes"},
    "a confidence head that reads the Markov head": {
        "markov_rank": 0,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
    "attention_mode = 'mla'": {"attention_mode": "mla"},
}


@pytest.mark.parametrize("words", WRONG_HEADS)
def test_wrong_fields_of_heads_are_named(tmp_path: Path, words: str) -> None:
    config = draft_config(dflash_config=DSPARK | WRONG_HEADS[words])
    with pytest.raises(Refusal, match=re.escape(words)) as refused:
        load_config(write(tmp_path, config))
    assert whole_sentences(refused.value)


def test_the_layout_of_dspark_depends_on_its_publisher(tmp_path: Path) -> None:
    """If `sample_from_anchor` is absent: DeepSpec's and SpecForge's predict from the anchor."""
    ours = load_config(write(tmp_path, draft_config(dflash_config=DSPARK)))
    assert (ours.family.name, ours.sample_from_anchor, ours.block_size) == (
        "DSpark",
        True,
        BLOCK + 1,
    )
    config, _ = speculators_draft(draft_vocab=VOCAB)
    theirs = load_config(write(tmp_path, config | {"speculators_model_type": "dspark"}))
    assert (theirs.sample_from_anchor, theirs.block_size) == (False, BLOCK)
    assert theirs.family == DSpark(Markov("vanilla", 256), Confidence(with_markov=True))
    both = load_config(write(tmp_path, draft_config(dspark_config=DSPARK, dflash_config=DSPARK)))
    assert both.family == ours.family


def test_the_embeddings_output_is_no_layer(tmp_path: Path) -> None:
    """DeepSpec allows it as id -1, which is index 0 of Transformers' hidden states."""
    ours = draft_config(dflash_config={"target_layer_ids": [-1, 2]})
    theirs = speculators_draft(draft_vocab=VOCAB)[0] | {"aux_hidden_state_layer_ids": [0, 3]}
    for config in (ours, theirs):
        with pytest.raises(Refusal, match="the output of the embedding") as refused:
            load_config(write(tmp_path, config))
        assert whole_sentences(refused.value)


def test_a_mask_embedding_for_each_position_is_refused(tmp_path: Path) -> None:
    each = {"embedding": torch.zeros(BLOCK, HIDDEN), "per_position": True}
    torch.save(each, tmp_path / "mask_embedding.pt")
    config = load_config(write(tmp_path, draft_config()))
    with pytest.raises(Refusal, match="each position of the block") as refused:
        read_mask_embedding(config)
    assert whole_sentences(refused.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("partial_rotary_factor", 0.5),
        ("is_neox_style", False),
        ("use_gemma_norm", True),
        ("attention_value_scale", 0.7),
        ("attn_logit_softcapping", 30.0),
        ("attention_sink_bias", True),
        ("rope_dim", 16),
    ],
)
@pytest.mark.parametrize("place", ["top", "dflash_config", "speculators"])
def test_other_layers_are_refused(tmp_path: Path, place: str, key: str, value: Any) -> None:
    """These fields change what a layer computes, and no tensor shows it."""
    config = draft_config(**({key: value} if place == "top" else {"dflash_config": {key: value}}))
    if place == "speculators":
        config = speculators_draft(draft_vocab=VOCAB, **{key: value})[0]
    with pytest.raises(Refusal, match=key) as refused:
        load_config(write(tmp_path, config))
    assert whole_sentences(refused.value)


def test_null_is_absent(tmp_path: Path) -> None:
    """Also for the fields by which families are told apart."""
    nulls = {"projector_type": None, "selector_rank": None, "markov_rank": None}
    plain = load_config(write(tmp_path, draft_config(dflash_config=nulls)))
    assert plain == load_config(write(tmp_path, draft_config()))
    section = DSPARK | {"sample_from_anchor": False}
    over = {"projector_type": "dspark", "sample_from_anchor": None, "markov_rank": None}
    merged = load_config(write(tmp_path, draft_config(dspark_config=section, dflash_config=over)))
    assert (merged.sample_from_anchor, merged.family) == (False, DSpark(Markov("vanilla", 4), None))
