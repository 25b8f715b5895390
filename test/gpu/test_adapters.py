"""LoRA adapters on a GPU: several in a batch, in graphs and without them."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_dflash.settings.options import VERIFY_WIDTH
from sglang_dflash.tiny import TARGET
from test.adapters import adapter_id, write_adapter
from test.cuts import verify_any_rows
from test.gpu.conftest import DRY_RUN, ON_GPU, N, engine, prompts
from test.inprocess import InProcess

pytestmark = [*ON_GPU, pytest.mark.usefixtures("native")]

NAMES = ("wide", None, "narrow", "head", "wide", None)
Answers = list[list[int]]


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("adapters")
    head = () if DRY_RUN else ("lm_head",)  # refused on a CPU
    write_adapter(folder / "wide", TARGET, rank=16, vocabulary=("embed_tokens",), strength=0.02)
    write_adapter(folder / "narrow", TARGET, rank=4, seed=1, strength=0.05)
    write_adapter(folder / "head", TARGET, rank=8, seed=2, vocabulary=head, strength=0.02)
    paths = [f"{name}={folder / name}" for name in ("wide", "narrow", "head")]
    fp32 = {"attention_backend": "triton", "dtype": "float32"}
    return fp32 | {"lora_paths": paths, "max_loras_per_batch": 4}


def add(run: InProcess, name: str | None, ids: list[int]) -> Any:
    return run.add(ids, lora_id=adapter_id(run, name), **N)


@pytest.fixture(scope="module")
def truth(native: None, flags: dict[str, Any]) -> Answers:
    """The answer to each request alone, without speculation and graphs."""
    plain = {"disable_cuda_graph": True, "disable_radix_cache": True, "lora_backend": "triton"}
    answers = []
    with engine(draft=False, **flags | plain) as run:
        for name, ids in zip(NAMES, prompts(len(NAMES)), strict=True):
            req = add(run, name, ids)
            run.run(req)
            answers.append(list(req.output_ids))
        req = add(run, None, prompts(1)[0])
        run.run(req)
    assert list(req.output_ids) != answers[0]  # the adapter changes it
    return answers


@pytest.mark.parametrize("kind", ["graphs", "eager", "auto"])
@pytest.mark.parametrize("backend", ["csgmv", "triton"])
def test_fp32_tokens_are_the_targets(
    flags: dict[str, Any],
    truth: Answers,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    kind: str,
) -> None:
    """Requests with different adapters join one after another. All tokens are the target's.

    auto: each step takes another of all verify widths.
    """
    monkeypatch.setenv(VERIFY_WIDTH, "auto" if kind == "auto" else "full")
    reqs = []
    with engine(**flags, lora_backend=backend, disable_cuda_graph=kind == "eager") as run:
        if kind == "auto":
            verify_any_rows(run.worker)
        for name, ids in zip(NAMES, prompts(len(NAMES)), strict=True):
            reqs.append(add(run, name, ids))
            run.step()
        run.run(*reqs)
    assert [list(req.output_ids) for req in reqs] == truth
    assert sum(req.spec_num_correct_drafts for req in reqs) > 0
