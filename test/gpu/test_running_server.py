"""What is done to a server while it runs, on a GPU: new weights, and watched steps."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

from sglang_dflash.tiny import DRAFT, TARGET
from sglang_dflash.trainer.hooks import FOLDER
from test.gpu.conftest import (
    ON_GPU,
    Margins,
    N,
    ask,
    engine,
    part_only_at_near_ties,
    prompts,
    together,
)
from test.inprocess import InProcess

pytestmark = ON_GPU


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled target with weaker MLPs. Its texts differ from the first tokens on."""
    folder = tmp_path_factory.mktemp("other") / "target"
    shutil.copytree(TARGET, folder)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("mlp.down_proj.weight"):
            weights[name] = weight * 0.2
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load(run: InProcess, path: Path) -> None:
    request = UpdateWeightFromDiskReqInput(str(path), load_format="auto", recapture_cuda_graph=True)
    done = run.scheduler.weight_updater.update_weights_from_disk(request)
    assert done.success, done.message


@pytest.mark.parametrize("backend", ["flashinfer", "fa3", "triton"])
def test_new_weights_from_disk(other: Path, backend: str) -> None:
    """Graphs are captured anew, of the draft too: it runs the target's embedding and LM head."""
    ids = prompts(6)
    with engine(draft=False, pair=(other, DRAFT), attention_backend=backend) as run:
        expected = together(run, ids)
    with engine(attention_backend=backend) as run:
        before = together(run, ids)
        load(run, other)
        margins = Margins(run)
        part_only_at_near_ties(ask(run, ids), margins, expected)
        load(run, TARGET)
        assert together(run, ids) == before
    assert before != expected


@pytest.mark.parametrize("backend", ["flashinfer", "fa3", "triton"])
def test_new_weights_of_the_draft(tmp_path: Path, backend: str) -> None:
    """Graphs run a draft that is worse, and then its own weights again."""
    shutil.copytree(DRAFT, tmp_path, dirs_exist_ok=True)
    worse = {name: w.flip(0) for name, w in load_file(DRAFT / "model.safetensors").items()}
    save_file(worse, tmp_path / "model.safetensors")
    with engine(attention_backend=backend) as run:
        steps = []
        for folder in (DRAFT, tmp_path, DRAFT):
            request = UpdateWeightFromDiskReqInput("", manifest={FOLDER: str(folder)})
            done = run.scheduler.weight_updater.update_weights_from_disk(request)
            assert done.success, done.message
            steps.append(sum(req.spec_verify_ct for req in ask(run, prompts(4))))
    assert steps[0] == steps[2] < steps[1] / 1.5


@pytest.mark.parametrize("backend", ["flashinfer", "fa3", "triton"])
def test_watched_steps(backend: str) -> None:
    """The steps of an answer add up to its tokens, and the accepted drafts are among these."""
    asked = N | {"return_logprob": True, "custom_params": {"spec_steps": True}}
    with engine(attention_backend=backend) as run:
        reqs = ask(run, prompts(4), **asked)
    for req in reqs:
        steps, tokens = req.spec_correct_drafts_histogram.steps, list(req.output_ids)
        assert len(steps) == req.spec_verify_ct
        assert 1 + sum(step.num_committed for step in steps) == len(tokens)
        for step in steps:
            accepted = step.drafts[: step.num_accepted]
            assert accepted == tokens[step.place : step.place + step.num_accepted]
