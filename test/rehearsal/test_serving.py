"""The three attention backends of a GPU give each request its answer without speculation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.settings.options import DRAFT_AHEAD
from test.checkpoints import VOCAB, prompt, speculators_draft, write_draft
from test.rehearsal.serving import (
    GRAMMAR,
    HEADS,
    Asked,
    N,
    all_kinds,
    answer,
    assert_drafts,
    engine,
    once_each,
    served,
    small_draft,
    two_drafts,
)

BACKENDS = ["fa3", "flashinfer", "triton"]
GRAPHS = [True, pytest.param(False, marks=pytest.mark.full)]


@pytest.fixture(scope="module")
def asked(small: Path) -> dict[str, Asked]:
    return answer(small, all_kinds())


@pytest.mark.parametrize(
    ("backend", "page", "ahead"),
    [
        pytest.param("fa3", 1, "on", marks=pytest.mark.full),
        ("fa3", 16, "off"),
        pytest.param("flashinfer", 1, "on", marks=pytest.mark.full),
        ("flashinfer", 16, "off"),
        ("triton", 1, "on"),
        pytest.param("triton", 16, "off", marks=pytest.mark.full),
    ],
)
def test_all_kinds_of_requests(
    small: Path,
    asked: dict[str, Asked],
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    page: int,
    ahead: str,
) -> None:
    """Batches change while they run, a prefix is cached, and a stop token is inside a block."""
    monkeypatch.setenv(DRAFT_AHEAD, ahead)
    reqs, drafts = served(small, asked, backend, page_size=page)
    assert reqs["stop"].finished_reason.to_json()["type"] == "stop"
    assert reqs["radix"].cached_tokens >= 32
    assert reqs["greedy"].spec_verify_ct < 12
    assert_drafts(small, reqs, drafts)


SEEDED: dict[str, Any] = {"enable_deterministic_inference": True, "cuda_graph_bs": [2]}


@pytest.fixture(scope="module")
def seeded(small: Path) -> dict[str, Asked]:
    drawn = N | {"max_new_tokens": 8, "temperature": 1.0}
    asked = {
        "plain": Asked(prompt(940, 5), drawn | {"sampling_seed": 7}),
        "sorted": Asked(prompt(941, 9), drawn | {"sampling_seed": 8, "top_k": 30}),
    }
    return answer(small, asked, **SEEDED)


@pytest.mark.ci
@pytest.mark.parametrize(("backend", "page"), once_each(BACKENDS, [16, 1]))
def test_seeded_draws(small: Path, seeded: dict[str, Asked], backend: str, page: int) -> None:
    """SGLang's deterministic kernels, and draws that depend on the seed of each request."""
    reqs, drafts = served(small, seeded, backend, page_size=page, **SEEDED)
    assert_drafts(small, reqs, drafts)


@pytest.mark.ci
@pytest.mark.parametrize("graphs", GRAPHS, ids=["graphs", "eager"])
def test_grammars_of_one_prefill(small: Path, graphs: bool) -> None:
    """SGLang's mask kernel uses the width of a row as its stride, and the vocabulary is padded."""
    asked = answer(small, {str(i): Asked(prompt(930 + i, 8), GRAMMAR) for i in range(3)})
    served(small, asked, "fa3", apart=0, disable_cuda_graph=not graphs)


@pytest.mark.ci
def test_the_context_ends_inside_a_block(small: Path) -> None:
    """FA3's page tables have room for the positions of a block behind the context."""
    asked = answer(small, {"long": Asked(prompt(950, 20), N | {"max_new_tokens": 74})})
    served(small, asked, "fa3", page_size=16, context_length=96)


@pytest.mark.ci
@pytest.mark.parametrize("graphs", GRAPHS, ids=["graphs", "eager"])
def test_two_drafts_without_a_verify_between(small: Path, graphs: bool) -> None:
    """FlashInfer plans the second draft while the device may not have run the first."""
    two_drafts(small, disable_cuda_graph=not graphs)


@pytest.mark.ci
def test_prefills_are_planned_by_the_device(small: Path) -> None:
    """If the target has windows, SGLang computes with these lengths on the device."""
    with engine(small, "flashinfer", cuda_graph_bs=[1]) as run:
        run.generate(prompt(958, 9), max_new_tokens=12, ignore_eos=True)
        assert run.worker.model_runner.attn_backend.indices_updater_prefill.kv_last_page_len.is_cuda


@pytest.mark.ci
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [("fa3", "triton"), ("flashinfer", "fa3")],
)
def test_two_backends(small: Path, prefill: str, decode: str) -> None:
    """The prefill backend verifies, and the other one drafts."""
    asked = answer(small, {str(i): Asked(prompt(957 + i, 20), N) for i in range(2)})
    backends: dict[str, Any] = {
        "prefill_attention_backend": prefill,
        "decode_attention_backend": decode,
    }
    reqs, drafts = served(small, asked, None, **backends)
    assert_drafts(small, reqs, drafts)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("backend", "ahead"), once_each(["flashinfer", "fa3", "triton"], ["on", "off"])
)
def test_the_draft_sees_a_part_of_the_context(
    small: Path, monkeypatch: pytest.MonkeyPatch, backend: str, ahead: str
) -> None:
    """The part begins at a page, so its exact length, for FlashInfer, follows from the whole."""
    monkeypatch.setenv(DRAFT_AHEAD, ahead)
    asked = answer(small, {"one": Asked(prompt(956, 90), N | {"max_new_tokens": 40})})
    flags: dict[str, Any] = {
        "speculative_draft_window_size": 24,
        "page_size": 16,
        "cuda_graph_bs": [1],
    }
    served(small, asked, backend, **flags)


@pytest.mark.ci
@pytest.mark.parametrize(("backend", "causal"), once_each(["fa3", "triton"], [False, True]))
@pytest.mark.parametrize("graphs", GRAPHS, ids=["graphs", "eager"])
def test_a_draft_with_windows(
    small: Path, tmp_path: Path, backend: str, causal: bool, graphs: bool
) -> None:
    """SGLang's Triton backend lists the KV of the window that the draft reports.

    Its FA3 backend closes windows to the right, which hides the rest of a block that is not causal.
    """
    method = {"target_layer_ids": [0, 1], "causal": causal}
    windows = {"layer_types": ["sliding_attention"], "sliding_window": 16}
    windowed = small_draft(dflash_config=method, **windows)
    (tmp_path / "target").symlink_to(small / "target")
    write_draft(tmp_path / "draft", *windowed)
    asked = answer(tmp_path, {"one": Asked(prompt(955, 30), N)})
    flags: dict[str, Any] = {"speculative_draft_attention_backend": backend, "cuda_graph_bs": [1]}
    flags["disable_cuda_graph"] = not graphs
    reqs, drafts = served(tmp_path, asked, "fa3", **flags)
    assert_drafts(tmp_path, reqs, drafts, windowed, layers=[("zlab", 16, causal)])


@pytest.mark.ci
@pytest.mark.parametrize("backend", ["fa3", pytest.param("triton", marks=pytest.mark.full)])
def test_a_window_of_the_anchor(small: Path, tmp_path: Path, backend: str) -> None:
    """A GPU's backends give each position the anchor's window, which ends one token earlier."""
    body = HEADS | {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    config, weights = speculators_draft(draft_vocab=VOCAB, **body, sliding_window=16)
    config |= {"aux_hidden_state_layer_ids": [1, 2], "sliding_window_non_causal": True}
    plain, layers = small_draft()
    weights = layers | {"embed_tokens.weight": weights["embed_tokens.weight"]}
    (tmp_path / "target").symlink_to(small / "target")
    write_draft(tmp_path / "draft", config, dict(weights))
    asked = answer(tmp_path, {"one": Asked(prompt(955, 30), N)})
    flags: dict[str, Any] = {
        "speculative_draft_attention_backend": backend,
        "disable_cuda_graph": True,
    }
    reqs, drafts = served(tmp_path, asked, "fa3", **flags)
    assert_drafts(tmp_path, reqs, drafts, (plain, weights), layers=[("zlab", 17, False)])
