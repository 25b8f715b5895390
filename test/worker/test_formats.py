"""Every format and feature: our drafts equal those of an independent reading, step by step.

Each case writes a random small checkpoint as its publisher would, and says in `Semantics` how it is
to be read. 200 tokens, fp32, page sizes 1 and 16. The mutants of a case must be caught.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.server_args import ServerArgs
from torch import Tensor
from transformers import Qwen3ForCausalLM

from sglang_dflash.errors import Refusal
from sglang_dflash.settings.options import VERIFY_WIDTH
from sglang_dflash.tools.launch import free_port
from test.checkpoints import BLOCK, HIDDEN, prompt
from test.formats import CASES, by_own_names, speculators, write
from test.inprocess import InProcess
from test.ranks import on_two_ranks
from test.reference import Semantics, draft_block
from test.traces import trace

TOKENS = 100
PROMPT = prompt(31, 40)


Steps = list[tuple[list[int], list[int]]]  # the output so far, and the block behind it
Served = Callable[[str, int], Steps]  # the fixture `served`


@pytest.fixture(scope="module")
def served(target: str, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """What a case drafts at a page size. A case is served once for all tests of this file."""

    @cache
    def serve(case: str, page: int) -> Steps:
        config, weights, _ = CASES[case]()
        path = write(tmp_path_factory.mktemp("draft"), config, weights)
        tokens = TOKENS if case in ("zlab", "speculators", "zlab sliding") else 32
        with InProcess(target, str(path), page_size=page) as engine:
            return trace(engine, PROMPT, tokens)

    return serve


def agreement(
    model: Qwen3ForCausalLM, steps: Steps, weights: dict[str, Any], semantics: Semantics
) -> Iterator[bool]:
    """For each step of a request: did we draft what the reference drafts?"""
    own = by_own_names(weights)
    for output, block in steps:
        ids = PROMPT + output
        yield block == [ids[-1], *draft_block(model, semantics, own, ids)]


@pytest.mark.parametrize("page", [1, pytest.param(16, marks=pytest.mark.full)])
@pytest.mark.parametrize("case", CASES)
def test_drafts_equal_the_reference(
    served: Served, model: Qwen3ForCausalLM, case: str, page: int
) -> None:
    _, weights, semantics = CASES[case]()
    agreed = list(agreement(model, served(case, page), weights, semantics))
    assert len(agreed) > 10
    assert all(agreed)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("case", "share"),
    [("DeepSpec rnn", 0.8), ("DFlash 2", 0.8), ("Domino", 0.8), ("DSpine", 0.8), ("LiLiCorr", 0.6)],
)
def test_drafts_in_bfloat16(
    target: str, model: Qwen3ForCausalLM, tmp_path: Path, case: str, share: float
) -> None:
    """Most drafts are those of the reference in float32, behind drafts that are. Few are near-ties.

    LiLiCorr's random transformer amplifies rounding.
    """
    config, weights, semantics = CASES[case]()
    path, own = str(write(tmp_path, config, weights)), by_own_names(weights)
    with InProcess(target, path, dtype="bfloat16") as engine:
        steps = trace(engine, PROMPT, 32)
    right = []
    for output, block in steps:
        pairs = zip(block[1:], draft_block(model, semantics, own, PROMPT + output), strict=True)
        for draft, expected in pairs:
            right.append(draft == expected)
            if draft != expected:
                break
    assert len(right) > 30
    assert sum(right) >= share * len(right)


Trace = tuple[list[tuple[list[int], list[int]]], list[list[float]]]  # steps, probabilities


def drafts_of_rank(
    rank: int, target: str, page: int, drafts: list[tuple[str, float, int]]
) -> dict[str, Trace]:
    """What a rank drafts that serves drafts (path, noise, port) together with another one."""
    traces = {}
    for path, noise, port in drafts:
        flags = {"tp_size": 2, "tp_rank": rank, "nccl_port": port, "page_size": page}
        with InProcess(target, path, **flags) as engine:
            model = engine.worker.draft_model_runner.model
            vocabulary = model.vocabulary
            vocabulary.lm_head.weight.data[vocabulary.columns :] = 1e4  # rows that pad
            for parameter in model.head.parameters():
                if rank == 1:
                    parameter.data += noise * torch.randn_like(parameter)
            probabilities = watched(engine.worker.drafter)
            traces[path] = trace(engine, PROMPT, 24), probabilities
    return traces


def watched(drafter: Any) -> list[list[float]]:
    """A list that gets the probabilities of each drafted block, if they are computed."""
    propose, found = drafter.propose, []

    def proposed(*given: Any) -> Any:
        block = propose(*given)
        if block.probabilities is not None:
            found.append(block.probabilities[0].tolist())
        return block

    drafter.propose = proposed
    return found


SOME = [
    "speculators draft vocabulary",
    "DeepSpec rnn",
    "speculators DSpark",
    "DFlash 2",
    "Domino shifted, pure 1",
    "DSpine sliding, cap, padded vocabulary",
    "LiLiCorr",
]
# What a rank computes by itself may differ in its last bits. Here it differs by more.
APART = [
    *("DeepSpec vanilla", "DeepSpec DFlash with confidence", "DFlash 2", "Domino", "DSpine"),
    "LiLiCorr",
]
NOISE = 1e-2


@pytest.mark.parametrize(
    ("page", "cases", "apart"),
    [
        pytest.param(16, SOME, ["DFlash 2", "Domino", "DSpine"], marks=pytest.mark.ci),
        pytest.param(16, list(CASES), [], marks=pytest.mark.full),
        pytest.param(1, list(CASES), APART, marks=pytest.mark.full),
    ],
    ids=["16-some", "16-all", "1-all"],
)
def test_two_ranks_draft_what_the_reference_drafts(
    target: str,
    model: Qwen3ForCausalLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    page: int,
    cases: list[str],
    apart: list[str],
) -> None:
    """TP 2 on gloo: both ranks' draft tokens, step by step, and their probabilities.

    Ranks choose the verify width by the probabilities, so these must be the same, too. Drafts of
    ranks that compute apart equal no reference, but those of the other rank.
    """
    monkeypatch.setenv(VERIFY_WIDTH, "auto")
    asked = [(case, 0.0) for case in cases] + [(case, NOISE) for case in apart]
    paths = {str(tmp_path / str(i)): one for i, one in enumerate(asked)}
    for path, (case, _) in paths.items():
        config, weights, _ = CASES[case]()
        write(Path(path), config, weights)
    drafts = [(path, noise, free_port()) for path, (_, noise) in paths.items()]
    traces, others = on_two_ranks(drafts_of_rank, target, page, drafts)
    for path, (case, noise) in paths.items():
        assert traces[path] == others[path]
        steps, probabilities = traces[path]
        assert len(steps) > 10
        assert len(probabilities) >= len(steps)
        if not noise:
            _, weights, semantics = CASES[case]()
            assert all(agreement(model, steps, weights, semantics))


def domino_read(**changes: Any) -> Callable[[Semantics], Semantics]:
    """A reading that differs in Domino's GRU."""

    def mutate(semantics: Semantics) -> Semantics:
        assert semantics.domino is not None
        return replace(semantics, domino=replace(semantics.domino, **changes))

    return mutate


def correlated(**changes: Any) -> Callable[[Semantics], Semantics]:
    """A reading that differs in LiLiCorr's candidates."""

    def mutate(semantics: Semantics) -> Semantics:
        assert semantics.correlated is not None
        return replace(semantics, correlated=replace(semantics.correlated, **changes))

    return mutate


MUTANTS: dict[str, tuple[str, Callable[[Semantics], Semantics]]] = {
    "ids + 1": ("zlab", lambda s: replace(s, hidden_state_ids=[i + 1 for i in s.hidden_state_ids])),
    "speculators ids not shifted": (
        "speculators",
        lambda s: replace(s, hidden_state_ids=[i + 1 for i in s.hidden_state_ids]),
    ),
    "wrong theta": (
        "zlab",
        lambda s: replace(s, rope=[{"rope_type": "default", "rope_theta": 1e6}] * 2),
    ),
    "no yarn": (
        "zlab yarn",
        lambda s: replace(s, rope=[{"rope_type": "default", "rope_theta": 1e4}] * 2),
    ),
    "window off": ("zlab sliding", lambda s: replace(s, layers=[("full", None, False)] * 2)),
    "window off by one": (
        "zlab window 8",
        lambda s: replace(s, layers=[("zlab", 9, True), ("full", None, False)]),
    ),
    "not causal": (
        "zlab sliding",
        lambda s: replace(s, layers=[("zlab", 12, False), ("full", None, False)]),
    ),
    "JetSpec not causal": (
        "JetSpec",
        lambda s: replace(s, layers=[("full", None, False)] * 2),
    ),
    "no anchor": ("zlab sample_from_anchor", lambda s: replace(s, sample_from_anchor=False)),
    "no scale": ("zlab scale, cap, multiplier", lambda s: replace(s, embedding_scale=1.0)),
    "no mask embedding": ("zlab mask embedding", lambda s: replace(s, mask_embedding=None)),
    "no Markov head": ("DeepSpec vanilla", lambda s: replace(s, markov=None)),
    "no gate": ("DeepSpec gated", lambda s: replace(s, markov="vanilla")),
    "DeepSpec's layout": ("speculators DSpark", lambda s: replace(s, sample_from_anchor=True)),
    "SpecForge's other layout": (
        "SpecForge DSpark",
        lambda s: replace(s, sample_from_anchor=False),
    ),
    "no cap": ("SpecForge DSpark", lambda s: replace(s, logit_cap=None)),
    "no multiplier": ("SpecForge DSpark", lambda s: replace(s, logit_multiplier=1.0)),
    "no Domino": ("Domino", lambda s: replace(s, domino=None)),
    "labels shifted": ("Domino", domino_read(shift_label=True)),
    "labels not shifted": ("Domino shifted", domino_read(shift_label=False)),
    "pure prefix 1": ("Domino", domino_read(pure_prefix=1)),
    "pure prefix 0": ("Domino shifted, pure 1", domino_read(pure_prefix=0)),
    "pure prefix 4": ("Domino pure 3, logit_head.", domino_read(pure_prefix=4)),
    "state kept between blocks": ("Domino", domino_read(reads=lambda ids, drafts: ids + drafts)),
    "no anchor in the GRU": ("Domino", domino_read(reads=lambda ids, drafts: drafts)),
    "last token not in the GRU": (
        "Domino",
        domino_read(reads=lambda ids, drafts: (ids[-1:] + drafts)[:-1]),
    ),
    "no cap before Domino": ("Domino normalised", lambda s: replace(s, logit_cap=None)),
    "no multiplier before Domino": (
        "Domino normalised",
        lambda s: replace(s, logit_multiplier=1.0),
    ),
    "no convolutions": ("DFlash 2", lambda s: replace(s, convolved=None)),
    "no selector": ("DFlash 2", lambda s: replace(s, candidates=None)),
    "fewer candidates": ("DFlash 2 selector", lambda s: replace(s, candidates=6)),
    "edges without hidden": ("DFlash 2", lambda s: replace(s, edges_read_hidden=False)),
    "no cap before edges": ("DFlash 2 cap, multiplier", lambda s: replace(s, logit_cap=None)),
    "no multiplier before edges": (
        "DFlash 2 cap, multiplier",
        lambda s: replace(s, logit_multiplier=1.0),
    ),
    "no injection": ("DSpine", lambda s: replace(s, refined=None)),
    "fewer candidates of DSpine": ("DSpine", lambda s: replace(s, refined=4)),
    "the anchor tells no code": ("DSpine", lambda s: replace(s, told_anchor=False)),
    "DSpine not causal": ("DSpine", lambda s: replace(s, layers=[("full", None, False)] * 2)),
    "no candidates of LiLiCorr": ("LiLiCorr", lambda s: replace(s, correlated=None)),
    "fewer candidates of LiLiCorr": ("LiLiCorr", correlated(candidates=4)),
    "the opposite scores": ("LiLiCorr", correlated(scale=-10.0)),
    "no ranks": ("LiLiCorr", correlated(reads_ranks=False)),
    "no context before the anchor": ("LiLiCorr", correlated(reads_context=False)),
    "windows causal": (
        "speculators DFlash 2",
        lambda s: replace(s, layers=[("speculators", 12, True), ("full", None, False)]),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_reading_is_noticed(served: Served, model: Qwen3ForCausalLM, mutant: str) -> None:
    """The control: the oracle of the test above tells a wrong reading from the right one."""
    case, mutate = MUTANTS[mutant]
    _, weights, semantics = CASES[case]()
    assert not all(agreement(model, served(case, 1), weights, mutate(semantics)))


def test_each_spelling_of_direction_drafts_the_same(target: str, tmp_path: Path) -> None:
    """JetSpec's key, the reference's and z-lab's. The draft that states none drafts otherwise."""
    config, weights, _ = CASES["zlab"]()
    method = config["dflash_config"]
    spelled: dict[str, dict[str, Any]] = {
        "causal": {"dflash_config": method | {"causal": True}},
        "causal_head": {"dflash_config": method | {"causal_head": True}},
        "is_causal": {"is_causal": True},
        "": {},
    }
    traces = {}
    for name, fields in spelled.items():
        path = write(tmp_path / name / "draft", config | fields, weights)
        with InProcess(target, str(path)) as engine:
            traces[name] = trace(engine, PROMPT, 24)
    assert traces["causal_head"] == traces["causal"] == traces["is_causal"]
    assert traces[""] != traces["causal"]


def state_first(inner: Tensor) -> Tensor:
    """The columns of the correction's first layer for [GRU state; hidden state]."""
    return torch.cat([inner[:, HIDDEN:], inner[:, :HIDDEN]], dim=1)


def update_first(gates: Tensor) -> Tensor:
    """The rows of a GRU's weight with the gates in the order z, r, n."""
    reset, update, candidate = gates.chunk(3)
    return torch.cat([update, reset, candidate])


MATRICES: dict[str, dict[str, Callable[[Tensor], Tensor]]] = {
    "state before the hidden state": {"embed_proj.0.weight": state_first},
    "update gate before the reset gate": {
        "prefix_gru.weight_ih_l0": update_first,
        "prefix_gru.weight_hh_l0": update_first,
    },
}


@pytest.mark.parametrize("mutant", MATRICES)
def test_a_wrong_order_in_a_matrix_is_noticed(
    served: Served, model: Qwen3ForCausalLM, mutant: str
) -> None:
    """The control of Domino's weights, whose parts lie in one matrix."""
    _, weights, semantics = CASES["Domino"]()
    read = weights | {name: change(weights[name]) for name, change in MATRICES[mutant].items()}
    assert not all(agreement(model, served("Domino", 1), read, semantics))


def reordered(dimension: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The convolutions with this dimension, [2, taps, ..], in the other order."""

    def mutate(weights: dict[str, Any]) -> dict[str, Any]:
        changed = dict(weights)
        for name, weight in weights.items():
            if name.endswith("base_kernel"):
                changed[name] = weight.flip(dimension)
            if name.endswith("kernel_projection.weight"):
                rows = weight.view(2, 3, -1, weight.shape[1])  # 3 taps
                changed[name] = rows.flip(dimension).reshape(weight.shape)
        return changed

    return mutate


def codebooks_exchanged(weights: dict[str, Any]) -> dict[str, Any]:
    one, other = (f"candidate_selector.{kind}_codebook" for kind in ("predecessor", "successor"))
    return weights | {one: weights[other], other: weights[one]}


def gates_exchanged(weights: dict[str, Any]) -> dict[str, Any]:
    one, other = (f"injection.{kind}_gate.weight" for kind in ("receiver", "predecessor"))
    return weights | {one: weights[other], other: weights[one]}


def layers_exchanged(weights: dict[str, Any]) -> dict[str, Any]:
    one, other = (f"injection.writes.{layer}.weight" for layer in range(2))
    return weights | {one: weights[other], other: weights[one]}


def directions_exchanged(weights: dict[str, Any]) -> dict[str, Any]:
    one, other = "lilicorr.in_head.weight", "lilicorr.out_head.weight"
    return weights | {one: weights[other], other: weights[one]}


def slots_apart_the_other_way(weights: dict[str, Any]) -> dict[str, Any]:
    name = "lilicorr.relative_slot_bias"
    return weights | {name: weights[name].flip(1)}


Weights = dict[str, Any]
WEIGHT_MUTANTS: dict[str, tuple[str, Callable[[Weights], Weights]]] = {
    "sides exchanged": ("DFlash 2", reordered(0)),
    "taps exchanged": ("DFlash 2", reordered(1)),
    "codebooks exchanged": ("DFlash 2", codebooks_exchanged),
    "gates exchanged": ("DSpine", gates_exchanged),
    "layers exchanged": ("DSpine", layers_exchanged),
    "directions exchanged": ("LiLiCorr", directions_exchanged),
    "slots apart the other way": ("LiLiCorr", slots_apart_the_other_way),
}


@pytest.mark.parametrize("mutant", WEIGHT_MUTANTS)
def test_wrongly_read_weights_are_noticed(
    served: Served, model: Qwen3ForCausalLM, mutant: str
) -> None:
    """The same control, for what a weight of a family means."""
    case, mutate = WEIGHT_MUTANTS[mutant]
    _, weights, semantics = CASES[case]()
    assert not all(agreement(model, served(case, 1), mutate(weights), semantics))


def test_a_dropped_map_is_noticed(served: Served, model: Qwen3ForCausalLM) -> None:
    case = "speculators draft vocabulary"
    _, weights, semantics = CASES[case]()
    dropped = {name: weight for name, weight in weights.items() if name != "d2t"}
    assert not all(agreement(model, served(case, 1), dropped, semantics))


def test_speculators_as_model_path(target: str, tmp_path: Path) -> None:
    """A speculators folder as --model-path serves the target that it names; flags win."""
    config, weights, _ = speculators()
    config["speculators_config"]["verifier"]["name_or_path"] = target
    path = str(write(tmp_path / "own", config, weights))
    found = ServerArgs(model_path=path)
    assert found.speculative_algorithm == "DFLASH"
    assert (found.model_path, found.speculative_draft_model_path) == (target, path)
    assert found.tokenizer_path == target
    assert found.speculative_num_draft_tokens == BLOCK
    other = str(write(tmp_path / "other", *speculators(draft_vocab=64)[:2]))
    flags = {
        "speculative_draft_model_path": other,
        "speculative_num_draft_tokens": 4,
        "tokenizer_path": path,
        "served_model_name": "mine",
        "page_size": 16,
    }
    given = ServerArgs(model_path=path, **flags)
    assert {name: getattr(given, name) for name in flags} == flags
    assert given.model_path == target
    assert ServerArgs(model_path=path, speculative_dflash_block_size=3).model_path == target


def test_speculators_as_model_path_without_a_verifier(tmp_path: Path) -> None:
    config, weights, _ = speculators()
    del config["speculators_config"]["verifier"]
    with pytest.raises(Refusal, match="names no target"):
        ServerArgs(model_path=str(write(tmp_path, config, weights)))


def test_speculators_as_model_path_whose_target_does_not_exist(tmp_path: Path) -> None:
    config, weights, _ = speculators()
    config["speculators_config"]["verifier"]["name_or_path"] = str(tmp_path / "nowhere")
    with pytest.raises(Refusal, match=r"There is no target .*nowhere"):
        ServerArgs(model_path=str(write(tmp_path / "draft", config, weights)))
