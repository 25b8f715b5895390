"""Hybrid targets: SGLang's GDN kernels and graphs, with states that follow the committed tokens."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from test.checkpoints import write_draft
from test.rehearsal.serving import Asked, N, answer, engine, serve, small_draft
from test.rehearsal.serving import assert_exact
from test.worker.conftest import prompt
from test.worker.test_targets import LAYERS, write

BACKENDS = ["fa3", "flashinfer", "triton"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    write(folder / "target", "Qwen3_5ForConditionalGeneration")
    write_draft(folder / "draft", *small_draft(num_target_layers=LAYERS))
    return folder


@pytest.fixture(scope="module")
def asked(pair: Path) -> dict[str, Asked]:
    lengths = [1, 20, 9, 70]
    return answer(pair, {str(i): Asked(prompt(960 + i, n), N) for i, n in enumerate(lengths)})


@pytest.mark.parametrize("backend", BACKENDS)
def test_padded_batches(pair: Path, asked: dict[str, Asked], backend: str) -> None:
    with engine(pair, backend, cuda_graph_bs=[4], disable_radix_cache=True) as run:
        reqs = serve(run, asked)
    assert_exact(reqs, asked)


def test_eager(pair: Path, asked: dict[str, Asked]) -> None:
    with engine(pair, "fa3", disable_cuda_graph=True, disable_radix_cache=True) as run:
        reqs = serve(run, asked)
    assert_exact(reqs, asked)
