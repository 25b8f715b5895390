"""`sglang-dflash inspect`, and the refusals of broken files: one line each, without loading."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dflash.checkpoint import read_draft
from sglang_dflash.errors import Refusal
from sglang_dflash.tiny import DRAFT, TARGET
from sglang_dflash.tools.cli import main
from test.checkpoints import (
    draft_config,
    draft_weights,
    speculators_draft,
    write_draft,
    write_target,
)
from test.formats import CASES, domino, write
from test.releases import OWN_STEP


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(DRAFT), "--target", str(TARGET), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == {
        "fits": True,
        "reached": True,
        "family": "DFlash",
        "format": "zlab",
        "block_size": 16,
        "draft_width": 16,
        "target_layer_ids": {"transformers": [2, 4, 6, 8, 9], "sglang": [1, 3, 5, 7, 8]},
        "mask_token_id": 3,
        "kv_bytes_per_token": 2 * 2 * 3 * 2 * 128,
        "parameters": report["parameters"],
        "problems": [],
    }
    assert 1_000_000 < report["parameters"] < 2_000_000


def test_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(DRAFT), "--target", str(TARGET)]) == 0
    out = capsys.readouterr().out
    for words in ("zlab", "16 (15 drafts)", "<|mask|>", "theta 1e+06", "fits"):
        assert words in out


def test_a_block_counts_the_anchor(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With sample_from_anchor, a block is one position longer than the draft reads.

    On SGLang 0.5.23 it is as long.
    """
    positions = 9 if OWN_STEP else 8
    config = draft_config(dflash_config={"sample_from_anchor": True})
    draft = str(write_draft(tmp_path, config, draft_weights(config)))
    assert main(["inspect", draft, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["block_size"], report["draft_width"]) == (positions, 8)
    assert main(["inspect", draft]) == 0
    assert f"{positions} ({positions - 1} drafts)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("case", "family", "told"),
    [
        ("DeepSpec gated", "DSpark", ["Markov (gated, rank 16)", "confidence"]),
        ("DFlash 2", "DFlash 2", ["8 (7 drafts)", "convolutions (3 taps)", "selector (12"]),
        ("Domino", "Domino", ["8 (7 drafts)", "prefix GRU"]),
        ("DSpine", "DSpine", ["8 (7 drafts)", "injection (rank 24, messages of 20)", "(12 cand"]),
        ("LiLiCorr", "LiLiCorr", ["8 (7 drafts)", "(8 candidates, 2 layers of 32)"]),
        ("DSpine of Tencent", "DSpine", ["16 (15 drafts)", "(16 candidates)"]),
    ],
)
def test_families(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, case: str, family: str, told: list[str]
) -> None:
    config, weights, _ = CASES[case]()
    draft = str(write(tmp_path, config, weights))
    assert main(["inspect", draft, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["family"] == family
    assert main(["inspect", draft]) == 0
    out = capsys.readouterr().out
    for words in (family, *told):
        assert words in out


def test_a_domino_draft(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """N - 1 drafts, also where the anchor's position predicts one."""
    config, weights, _ = domino(shift_label=True, pure_draft_prefix_len=1)
    draft = str(write_draft(tmp_path, config, weights))
    assert main(["inspect", draft, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["family"], report["format"], report["block_size"]) == ("Domino", "domino", 8)
    assert main(["inspect", draft]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in (
        "Domino",
        "8 (7 drafts)",
        "state 24, inner 16",
        "pure prefix 1",
        "labels shifted",
    ):
        assert words in out


def test_misfit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = draft_config()
    draft = write_draft(tmp_path, config, draft_weights(config))
    assert main(["inspect", str(draft), "--target", str(TARGET), "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert not report["fits"]
    assert all(problem["what"] and problem["fix"] for problem in report["problems"])
    assert any("hidden size" in problem["what"] for problem in report["problems"])


def test_needs_no_sglang(tmp_path: Path) -> None:
    """It takes seconds and needs no GPU, because it does not import SGLang."""
    code = f"""
import sys
sys.modules["sglang"] = None
sys.modules["torch"] = None
from sglang_dflash.tools.cli import main
sys.exit(main(["inspect", {str(DRAFT)!r}, "--target", {str(TARGET)!r}]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


OTHERS: dict[str, dict[str, Any]] = {
    "DFlash 2": {"dflash_config": {"selector_rank": 8}},  # of no known form
    "DFlash 2 too": {"dflash_config": {"conv_kernel_size": 4}},
    "DFlash 2 of DSpark": {"architectures": ["DSparkDraftModel"], "conv_kernel_size": 2},
    "DSpark": {"dflash_config": {"markov_order": 2}},  # of no known form
    "DSpark by its class": {"architectures": ["Gemma4DSparkModel"]},
    "Domino by its class": {"architectures": ["Gemma4DominoDraftModel"]},
    "Domino": {  # of no known form
        "architectures": ["DominoDraftModel"],
        "dflash_config": {"projector_type": "dflash"},
    },
    "DFlash 2 by its class": {"architectures": ["DFlash2BeamDraftModel"]},
    "DSpark of DFlash 2": {"architectures": ["DFlash2DraftModel"], "markov_rank": 8},
    "EAGLE3": {"architectures": ["LlamaForCausalLMEagle3"]},
    "EAGLE": {"architectures": ["LlamaForCausalLMEagle"]},
    "EDSD": {"architectures": ["EdsdDraftModel"]},
    "H-Spec": {"architectures": ["HSpecDraftModel"], "hspec_config": {"num_hybrid_layers": 1}},
    "XPress": {"architectures": ["Qwen3XPressModel"], "xpress_rank": 64},
    "MTP": {"architectures": ["Qwen3NextForCausalLMMTP"]},
}


@pytest.mark.parametrize("method", OTHERS)
def test_other_methods_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    config = draft_config(**OTHERS[method])
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["inspect", str(tmp_path), "--json"]) == 2
    [problem] = json.loads(capsys.readouterr().out)["problems"]
    assert re.sub(" (too|by its class|of .*)", "", method) in problem["what"]
    assert "use a dflash draft" in problem["fix"].lower()


def truncated(folder: Path) -> Path:
    config = draft_config()
    path = write_draft(folder, config, draft_weights(config))
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    return path


def test_no_header(tmp_path: Path) -> None:
    config = draft_config()
    path = write_draft(tmp_path, config, draft_weights(config))
    (path / "model.safetensors").write_bytes(b"not a safetensors file at all, just text")
    with pytest.raises(Refusal, match="safetensors") as caught:
        read_draft(path)
    assert "\n" not in str(caught.value)


def test_wrong_dtype(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = draft_config()
    weights = draft_weights(config)
    weights["fc.weight"] = (weights["fc.weight"] * 10).to(torch.int8)
    assert main(["inspect", str(write_draft(tmp_path, config, weights)), "--json"]) == 2
    [problem] = json.loads(capsys.readouterr().out)["problems"]
    assert "fc.weight has dtype I8" in problem["what"]


def test_broken_weights_hide_no_other_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = truncated(tmp_path)
    assert main(["inspect", str(draft), "--target", str(TARGET), "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    found = " ".join(problem["what"] for problem in report["problems"])
    assert "truncated" in found
    assert "hidden size" in found
    assert (report["format"], report["block_size"], report["parameters"]) == ("zlab", 8, 0)


def test_a_draft_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(draft_config()))
    assert main(["inspect", str(tmp_path), "--json"]) == 2
    [problem] = json.loads(capsys.readouterr().out)["problems"]
    assert "no safetensors file" in problem["what"]


LAYER_TYPES = {"layer_types": ["linear_attention", "full_attention"]}
RECURRENT: dict[str, dict[str, Any]] = {
    "Qwen 3 Next": {"model_type": "qwen3_next", "linear_num_value_heads": 32},
    "Qwen 3.5": {"text_config": LAYER_TYPES | {"model_type": "qwen3_5_text"}},
    "Nemotron H": {"hybrid_override_pattern": "M*M-"},
    "another": {"text_config": LAYER_TYPES},
}


@pytest.mark.parametrize(
    ("family", "served"), zip(RECURRENT, [True, True, False, False], strict=True)
)
def test_recurrent_targets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str, served: bool
) -> None:
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 160}
    target, fields = tmp_path / "target", RECURRENT[family]
    target.mkdir()
    text = sizes | fields.get("text_config", fields)
    raw = {"text_config": text} if "text_config" in fields else text
    (target / "config.json").write_text(json.dumps(raw))
    config = draft_config()
    draft = write_draft(tmp_path / "draft", config, draft_weights(config))
    assert main(["inspect", str(draft), "--target", str(target), "--json"]) == (0 if served else 2)
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert ["recurrent state" in problem["what"] for problem in problems] == [True] * (not served)


JSON_TYPES = {
    "fits": bool,
    "reached": bool,
    "family": str,
    "format": str,
    "block_size": int,
    "draft_width": int,
    "target_layer_ids": dict,
    "mask_token_id": int,
    "kv_bytes_per_token": int,
    "parameters": int,
    "problems": list,
}


@pytest.mark.parametrize("what", ["sound", "broken", "missing"])
def test_json_keeps_its_shape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    if what == "broken":
        (tmp_path / "config.json").write_text("{")
    main(
        ["inspect", {"sound": str(DRAFT), "missing": "nowhere"}.get(what, str(tmp_path)), "--json"]
    )
    report = json.loads(capsys.readouterr().out)
    assert {name: type(value) for name, value in report.items()} == JSON_TYPES
    assert set(report["target_layer_ids"]) == {"transformers", "sglang"}
    for problem in report["problems"]:
        assert problem.keys() == {"what", "fix"}
        assert all(half[0].isupper() and half.endswith(".") for half in problem.values())
    assert report["fits"] == (not report["problems"]) == (what == "sound")


def test_every_row_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A speculators draft with windows and its own vocabulary, with its target."""
    kinds = ["sliding_attention", "full_attention"]
    config, weights = speculators_draft(layer_types=kinds, sliding_window=12)
    draft = write_draft(tmp_path / "draft", config, weights)
    target = write_target(tmp_path / "target")
    assert main(["inspect", str(draft), "--target", str(target)]) == 0
    out = capsys.readouterr().out
    rows: tuple[str, ...] = (
        "speculators",
        "8 (7 drafts)",
        "[1, 3]",
        "[0, 2]",
        "150 t150",
        "64 of 160, mapped by d2t",
    )
    rows += ("theta 10000", "12", "causal", "512", "of its parameters", "fits")
    for words in rows:
        assert words in out


@pytest.mark.parametrize("name", ["config.json", "text_config"])
def test_a_target_without_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    raw = {} if name == "config.json" else {"text_config": "none"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert main(["inspect", str(DRAFT), "--target", str(tmp_path), "--json"]) == 2
    [problem] = json.loads(capsys.readouterr().out)["problems"]
    assert "is not the config of a target" in problem["what"]
    assert "hidden_size" in problem["what"]
    assert problem["fix"] == "Give the folder of a target as --target."


def test_brackets_are_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path / "[red]draft")]) == 2
    assert "[red]draft" in capsys.readouterr().out.replace("\n", "")


def test_a_path_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "/nowhere/at/all", "--json"]) == 2
    assert "not a folder" in capsys.readouterr().out
