"""Broken drafts are refused in one clear line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sglang_dflash.checkpoint import hub
from sglang_dflash.engine import hooks
from sglang_dflash.errors import Refusal
from test.arguments import arguments, launch, refused
from test.checkpoints import draft_config, draft_weights, write_draft


def sound(folder: Path) -> Path:
    config = draft_config()
    return write_draft(folder, config, draft_weights(config))


def truncated(folder: Path) -> None:
    file = sound(folder) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def missing_shard(folder: Path) -> None:
    index = {"weight_map": {"fc.weight": "model.safetensors", "norm.weight": "gone.safetensors"}}
    (sound(folder) / "model.safetensors.index.json").write_text(json.dumps(index))


def not_a_number(folder: Path) -> None:
    config = draft_config()
    weights = draft_weights(config)
    weights["fc.weight"][1, 2] = float("nan")
    write_draft(folder, config, weights)


def wrong_dtype(folder: Path) -> None:
    config = draft_config()
    weights = draft_weights(config)
    weights["norm.weight"] = weights["norm.weight"].to(torch.int8)
    write_draft(folder, config, weights)


def no_json(folder: Path) -> None:
    (sound(folder) / "config.json").write_text('{"architectures": [')


def no_weights(folder: Path) -> None:
    (sound(folder) / "model.safetensors").unlink()


def nothing(folder: Path) -> None:
    """The path does not exist."""


Breaking = Callable[[Path], None]
BROKEN: dict[Breaking, str] = {
    truncated: "truncated",
    missing_shard: "gone.safetensors",
    not_a_number: "NaN or infinity in fc.weight",
    wrong_dtype: "norm.weight has dtype I8",
    no_json: "cannot be read as JSON",
    no_weights: "no safetensors file",
    nothing: "is not a folder",
}


@pytest.mark.parametrize("breaking", BROKEN)
def test_a_broken_draft_is_refused(target: str, tmp_path: Path, breaking: Breaking) -> None:
    breaking(tmp_path / "draft")
    with pytest.raises(Refusal, match=BROKEN[breaking]) as caught:
        arguments(target, str(tmp_path / "draft"))
    message = str(caught.value)
    assert "\n" not in message
    assert "fetch" in message.lower() or "give" in message.lower()


@pytest.mark.ci  # test_refusals.py shows it with another refusal
def test_the_command_ends_with_one_line(target: str, tmp_path: Path) -> None:
    """Status 1 and no traceback: nothing is loaded."""
    not_a_number(tmp_path / "draft")
    flags = ["--model-path", target, "--speculative-algorithm", "DFLASH"]
    line = refused(launch(*flags, "--speculative-draft-model-path", str(tmp_path / "draft")))
    assert BROKEN[not_a_number] in line


def of_sglang(*_: object, **__: object) -> str:
    return "SGLang's own"


def test_sglang_reads_no_broken_draft(tmp_path: Path) -> None:
    """Its config is a draft's, so this package reads it or refuses it."""
    truncated(tmp_path / "draft")
    with pytest.raises(Refusal, match="truncated"):
        hooks.get_config(of_sglang, str(tmp_path / "draft"), revision=None)


def test_the_hub_is_asked_once_for_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str, *_: object, **__: object) -> str:
        asked.append(name)
        raise ValueError("no such model")

    monkeypatch.setattr(hub, "hf_hub_download", download)
    for hook in (hooks.get_config, hooks.get_generation_config):
        assert hook(of_sglang, "nobody/target", revision=None) == "SGLang's own"
    assert asked == ["nobody/target"]
