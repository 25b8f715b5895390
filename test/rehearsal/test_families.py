"""Drafts with heads of their own, on the attention backends of a GPU and inside their graphs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.settings.options import VERIFY_WIDTH
from test.checkpoints import (
    INNER,
    STATE,
    convolution_weights,
    domino_weights,
    head_weights,
    injection_weights,
    lilicorr_weights,
    prompt,
    selector_weights,
    write_draft,
)
from test.reference import Correlated, Domino
from test.rehearsal.device import kernels
from test.rehearsal.mutation import Change, mutate
from test.rehearsal.serving import (
    Asked,
    Drafts,
    N,
    answer,
    assert_drafts,
    engine,
    once_each,
    served,
    small_draft,
)

pytestmark = pytest.mark.ci

DOCS = Path(__file__).parents[2] / "docs" / "performance.md"
BACKENDS = ["fa3", "flashinfer", "triton"]
Family = tuple[tuple[dict[str, Any], dict[str, Any]], dict[str, Any]]  # a draft, how to read it


def dspark(kind: str) -> Family:
    """A DSpark draft with this Markov head, as SpecForge exports it."""
    method = {
        "target_layer_ids": [0, 1],
        "projector_type": "dspark",
        "markov_rank": 16,
        "markov_head_type": kind,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    config, weights = small_draft(architectures=["DSparkDraftModel"], dflash_config=method)
    reading = {"markov": kind, "sample_from_anchor": True}
    return (config, weights | head_weights(kind)), reading


def dflash2() -> Family:
    """A DFlash 2 draft, as z-lab writes it."""
    method = {
        "target_layer_ids": [0, 1],
        "conv_kernel_size": 3,
        "conv_group_size": 8,
        "selector_rank": 16,
        "selector_top_k": 12,
    }
    config, weights = small_draft(architectures=["DFlash2DraftModel"], dflash_config=method)
    weights |= convolution_weights(taps=3, group=8, layers=1) | selector_weights(rank=16)
    return (config, weights), {"convolved": 8, "candidates": 12}


def domino(shifted: bool) -> Family:
    """A Domino draft with this layout, whose first draft is not corrected."""
    method = {
        "target_layer_ids": [0, 1],
        "projector_type": "domino",
        "emb_dim": INNER,
        "gru_hidden_dim": STATE,
        "pure_draft_prefix_len": 1,
        "shift_label": shifted,
    }
    config, weights = small_draft(architectures=["DominoDraftModel"], dflash_config=method)
    return (config, weights | domino_weights()), {"domino": Domino(shifted, 1)}


def dspine() -> Family:
    """A DSpine draft, as SpecForge writes it."""
    config, weights = small_draft(
        architectures=["DSpineDraftModel"],
        is_causal=True,
        dflash_config={"target_layer_ids": [0, 1]},
        dspine_config={"transfer_rank": 24, "message_size": 20, "top_k": 12},
    )
    weights |= injection_weights(24, 20, layers=1)
    return (config, weights), {"layers": [("full", None, True)], "refined": 12}


def lilicorr() -> Family:
    """A LiLiCorr draft, as ModelOpt writes it."""
    method = {
        "target_layer_ids": [0, 1],
        "projector_type": "lilicorr",
        "lilicorr_candidate_topk": 4,
        "lilicorr_hidden_size": 32,
        "lilicorr_num_layers": 1,
        "lilicorr_num_heads": 4,
        "lilicorr_mlp_ratio": 3.0,
        "lilicorr_factor_dim": 12,
        "lilicorr_vector_eps": 1e-6,
        "lilicorr_logit_scale": 10.0,
    }
    config, weights = small_draft(architectures=["LiLiCorrDraftModel"], dflash_config=method)
    weights |= lilicorr_weights(32, top_k=4, layers=1)
    return (config, weights), {"correlated": Correlated(4)}


def only(chosen: set[Any], cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """These cases, of which all but the chosen ones are `full`."""
    return [
        case if case in chosen else pytest.param(*case, marks=pytest.mark.full) for case in cases
    ]


def served_family(
    small: Path, folder: Path, family: Family, backend: str, **flags: Any
) -> tuple[dict[str, Any], Drafts]:
    """Serve three requests with a draft of this family, and check their answers."""
    (folder / "target").symlink_to(small / "target")
    write_draft(folder / "draft", *family[0])
    asked = answer(folder, {str(i): Asked(prompt(980 + i, 9 + 7 * i), N) for i in range(3)})
    return served(folder, asked, backend, cuda_graph_bs=[4], **flags)


@pytest.mark.parametrize(("backend", "kind"), once_each(BACKENDS, ["vanilla", "gated", "rnn"]))
@pytest.mark.parametrize("page", [1, pytest.param(16, marks=pytest.mark.full)])
def test_dspark(small: Path, tmp_path: Path, kind: str, backend: str, page: int) -> None:
    """Batches of one to three requests run in a graph of four, whose other rows are stale."""
    family = dspark(kind)
    reqs, drafts = served_family(small, tmp_path, family, backend, page_size=page)
    assert_drafts(tmp_path, reqs, drafts, family[0], **family[1])


@pytest.mark.parametrize(
    ("backend", "shifted"), only({("fa3", True)}, itertools.product(BACKENDS, [True, False]))
)
def test_domino(small: Path, tmp_path: Path, backend: str, shifted: bool) -> None:
    """The GRU runs in the draft's graph, and reads embeddings of tokens that the graph drafts."""
    family = domino(shifted)
    reqs, drafts = served_family(small, tmp_path, family, backend)
    assert_drafts(tmp_path, reqs, drafts, family[0], **family[1])


WALKS = {(dflash2, "triton", 16), (dspine, "fa3", 16), (lilicorr, "fa3", 16)}
FAMILIES = [dflash2, dspine, lilicorr]  # that walk over candidates


@pytest.mark.parametrize(
    ("make", "backend", "page"), only(WALKS, itertools.product(FAMILIES, BACKENDS, [1, 16]))
)
def test_walks(
    small: Path, tmp_path: Path, make: Callable[[], Family], backend: str, page: int
) -> None:
    """A position reads those before it in its own block only, and LiLiCorr what a step has kept."""
    family = make()
    reqs, drafts = served_family(small, tmp_path, family, backend, page_size=page)
    assert_drafts(tmp_path, reqs, drafts, family[0], **family[1])


def test_confidences_choose_the_width(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft's graph returns them beside the tokens."""
    monkeypatch.setenv(VERIFY_WIDTH, "auto")
    family = dspark("vanilla")
    reqs, drafts = served_family(small, tmp_path, family, "fa3")
    assert_drafts(tmp_path, reqs, drafts, family[0], **family[1])


FULL = [pytest.param(dtype, marks=pytest.mark.full) for dtype in ("float16", "float32")]


@pytest.mark.parametrize("dtype", ["bfloat16", *FULL])
def test_the_head_compiles(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Its kernel, for sm_90."""
    found: dict[str, set[str]] = {}
    monkeypatch.setattr(kernels, "COMPILED", found)
    (tmp_path / "target").symlink_to(small / "target")
    write_draft(tmp_path / "draft", *dspark("vanilla")[0])
    with engine(tmp_path, "triton", dtype=dtype, disable_cuda_graph=True) as run:
        run.generate(prompt(1, 6), **N | {"max_new_tokens": 2})
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[dtype]
    kinds = found["sglang_dflash.kernels.biased_argmax:_largest_biased_of_parts"]
    assert any(f"*{short}" in kind for kind in kinds)


@pytest.mark.full
def test_launches(small: Path, tmp_path: Path) -> None:
    """docs/performance.md lists the launches inside the graph of a small draft of each family."""
    families = {
        "DFlash": (small_draft(), {}),
        "DSpark, vanilla": dspark("vanilla"),
        "DSpark, gated": dspark("gated"),
        "DSpark, rnn": dspark("rnn"),
        "DFlash 2": dflash2(),
        "Domino": domino(shifted=False),
        "DSpine": dspine(),
        "LiLiCorr": lilicorr(),
    }
    counted = {}
    for name, (draft, _) in families.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "target").symlink_to(small / "target")
        write_draft(folder / "draft", *draft)
        with engine(folder, "fa3", cuda_graph_bs=[4]) as run:
            [graph] = run.worker.draft_model_runner.graph_runner.graphs.values()
            counted[name] = len(graph._recording.launches)
    rows = re.findall(r"^\| ([\w ,]+) \| (\d+) \|$", DOCS.read_text(), re.M)
    assert counted.items() <= {name: int(count) for name, count in rows}.items()


CHAIN = "model.families.dspark:Chain.blocks"
MUTATIONS = [
    (CHAIN, "token = biased.ids", "token = token"),
    (CHAIN, "logits[n],", "logits[0],"),
    ("kernels.biased_argmax:launch_biased_largest", "logits.stride(0),", "latent.stride(0),"),
]


@pytest.mark.full
def test_a_gru_of_the_anchor_alone_is_noticed(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(
        monkeypatch,
        "model.families.domino:PrefixChain.blocks",
        "token = draft.ids",
        "token = token",
    )
    family = domino(shifted=True)
    reqs, drafts = served_family(small, tmp_path, family, "triton")
    with pytest.raises(AssertionError):
        assert_drafts(tmp_path, reqs, drafts, family[0], **family[1])


@pytest.mark.full
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation[2])
def test_a_wrong_walk_is_noticed(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutation: Change
) -> None:
    """Tokens are still right, but drafts are not, so acceptance would fall."""
    mutate(monkeypatch, *mutation)
    family = dspark("vanilla")
    reqs, drafts = served_family(small, tmp_path, family, "fa3")
    with pytest.raises(AssertionError):
        assert_drafts(tmp_path, reqs, drafts, family[0], **family[1])
