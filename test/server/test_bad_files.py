"""Broken drafts over the real command: one clear line, status 1, no traceback, nothing loaded."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import pytest
import torch

from test.checkpoints import draft_config, draft_weights, write_draft
from test.worker.test_refusals import launch, refused


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


Breaking: TypeAlias = Callable[[Path], None]
Answers: TypeAlias = dict[Breaking, subprocess.CompletedProcess[str]]
BROKEN: dict[Breaking, str] = {
    truncated: "truncated",
    missing_shard: "gone.safetensors",
    not_a_number: "NaN or infinity in fc.weight",
    wrong_dtype: "norm.weight has dtype I8",
    no_json: "cannot be read as JSON",
    no_weights: "no safetensors file",
    nothing: "is not a folder",
}


@pytest.fixture(scope="module")
def answers(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """The command's result on each of them, two at a time."""
    folder = tmp_path_factory.mktemp("broken")

    def run(breaking: Breaking) -> subprocess.CompletedProcess[str]:
        breaking(folder / breaking.__name__)
        flags = ["--model-path", str(small / "target"), "--speculative-algorithm", "DFLASH"]
        return launch(*flags, "--speculative-draft-model-path", str(folder / breaking.__name__))

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(BROKEN, pool.map(run, BROKEN), strict=True))


@pytest.mark.parametrize("breaking", BROKEN)
def test_a_broken_draft_is_one_line(answers: Answers, breaking: Breaking) -> None:
    line = refused(answers[breaking])
    assert BROKEN[breaking] in line
    assert "fetch" in line.lower() or "give" in line.lower()
