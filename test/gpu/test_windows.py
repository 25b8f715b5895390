"""Drafts that see a part of the context, on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from sglang_dflash.tiny import DRAFT, TARGET
from test.checkpoints import write_draft
from test.gpu.conftest import (
    ON_GPU,
    accept_length,
    ask,
    engine,
    prompts,
)

pytestmark = ON_GPU

WINDOW = 32
# Accept lengths on a CPU in fp32, which a dry run measures again: without a window, with one from
# the server, and with one from the draft. A window of 24 or 48 tokens gives 3.60 or 8.38.
WHOLE, BY_SERVER, BY_DRAFT = 12.41, 3.99, 3.22


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled draft with sliding windows in all layers, for which it was not trained."""
    config = json.loads((DRAFT / "config.json").read_text())
    config["layer_types"] = ["sliding_attention"] * config["num_hidden_layers"]
    config |= {"use_sliding_window": True, "sliding_window": WINDOW}
    weights = load_file(DRAFT / "model.safetensors")
    return write_draft(tmp_path_factory.mktemp("windows") / "draft", config, weights)


def accepted(backend: str, draft: Path, **flags: Any) -> float:
    """The accept length of whole answers."""
    with engine(pair=(TARGET, draft), attention_backend=backend, **flags) as run:
        return accept_length(ask(run, prompts(6), ignore_eos=False))


@pytest.mark.parametrize("backend", ["flashinfer", "fa3", "triton"])
def test_a_window_of_the_server(backend: str) -> None:
    """Each backend hides as much of the context from the draft as a CPU's does."""
    assert accepted(backend, DRAFT) == pytest.approx(WHOLE, rel=0.1)
    cut = accepted(backend, DRAFT, speculative_draft_window_size=WINDOW)
    assert cut == pytest.approx(BY_SERVER, rel=0.1)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("backend", ["fa3", "triton"])
def test_a_draft_with_windows(windowed: Path, backend: str, graphs: bool) -> None:
    found = accepted(backend, windowed, disable_cuda_graph=not graphs)
    assert found == pytest.approx(BY_DRAFT, rel=0.1)
