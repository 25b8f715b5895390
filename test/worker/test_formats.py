"""Every format and feature: our drafts equal those of an independent reading, step by step.

Each case writes a random small checkpoint as its publisher would, and says in `Semantics` how it is
to be read. 200 tokens, fp32, page sizes 1 and 16. The mutants of a case must be caught.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from sglang.srt.server_args import ServerArgs
from transformers import Qwen3ForCausalLM

from sglang_dflash.errors import Refusal
from sglang_dflash.launch import free_port
from test.checkpoints import (
    BLOCK,
    HIDDEN,
    MASK,
    VOCAB,
    draft_config,
    draft_weights,
    speculators_draft,
    write_draft,
)
from test.inprocess import InProcess
from test.reference import Semantics, draft_block
from test.worker.conftest import prompt
from test.worker.test_draft import trace

TOKENS = 200
SLIDING = ["sliding_attention", "full_attention"]
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "rope_theta": 10_000.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 50_000.0,
}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}
PLAIN = {"rope_theta": 10_000.0}
KIMI = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}
GPT_OSS = YARN | {"truncate": False, "attention_factor": 0.5}
SHORT_YARN = YARN | {"original_max_position_embeddings": 8}


Case: TypeAlias = tuple[dict[str, Any], dict[str, Any], Semantics]  # config, weights, how to read


def zlab(**changes: Any) -> Case:
    config = draft_config(**changes)
    return config, draft_weights(config), Semantics.of_zlab({**draft_config(), **config})


def with_rope(parameters: dict[str, Any], how: str) -> Case:
    """The same RoPE in each of the places where publishers put it."""
    theta = parameters["rope_theta"]
    scaling = {k: v for k, v in parameters.items() if k != "rope_theta"}
    changes = {
        "rope_parameters": {"rope_parameters": parameters, "rope_theta": None},
        "rope_scaling": {"rope_theta": theta, "rope_scaling": scaling},
        "type": {
            "rope_theta": theta,
            "rope_scaling": {("type" if k == "rope_type" else k): v for k, v in scaling.items()},
        },
    }[how]
    config, weights, semantics = zlab(
        **changes | {"rope_theta": changes.get("rope_theta") or theta}
    )
    if how == "rope_parameters":
        config["rope_theta"] = None
    return config, weights, replace(semantics, rope=[parameters] * 2)


def speculators(
    draft_vocab: int = VOCAB,
    own_embedding: bool = True,
    body: dict[str, Any] | None = None,
    **changes: Any,
) -> Case:
    config, weights = speculators_draft(draft_vocab, **(body or {}))
    if not own_embedding:
        del weights["embed_tokens.weight"]
    return config | changes, weights, Semantics.of_zlab(draft_config(), hidden_state_ids=[1, 3])


def sliding_speculators(non_causal: bool, window: int = 12) -> Case:
    body = {"layer_types": SLIDING, "sliding_window": window}
    changes = {"sliding_window_non_causal": True} if non_causal else {}
    config, weights, semantics = speculators(body=body, **changes)
    layers = [("speculators", window, not non_causal), ("full", None, False)]
    return config, weights, replace(semantics, layers=layers)


def sliding_zlab(window: int = 12, causal: bool | None = None, **changes: Any) -> Case:
    method = {} if causal is None else {"causal": causal}
    config, weights, semantics = zlab(
        layer_types=SLIDING, sliding_window=window, dflash_config=method, **changes
    )
    in_block = True if causal is None else causal
    full = ("full", None, bool(causal))
    return config, weights, replace(semantics, layers=[("zlab", window, in_block), full])


def per_type_rope() -> Case:
    other = {"rope_type": "default", "rope_theta": 500.0}
    plain = {"rope_type": "default", "rope_theta": 10_000.0}
    config, weights, semantics = sliding_zlab()
    config |= {"rope_parameters": {"sliding_attention": other, "full_attention": plain}}
    return config, weights, replace(semantics, rope=[other, plain])


def biased() -> Case:
    config, weights, semantics = zlab(attention_bias=True)
    rng = torch.Generator().manual_seed(5)
    for name in [n for n in weights if "_proj.weight" in n and "self_attn" in n]:
        weights[name.replace("weight", "bias")] = torch.randn(len(weights[name]), generator=rng)
    return config, weights, semantics


def masked(as_dict: bool) -> Case:
    config, weights, semantics = zlab()
    vector = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(6))
    weights["mask_embedding.pt"] = (
        {"mask_token_id": MASK, "embedding": vector} if as_dict else vector[None]
    )
    return config, weights, replace(semantics, mask_embedding=vector)


def from_anchor(kind: str) -> Case:
    if kind == "zlab":
        config, weights, semantics = zlab(dflash_config={"sample_from_anchor": True})
    else:
        config, weights, semantics = speculators(sample_from_anchor=True)
    return config, weights, replace(semantics, sample_from_anchor=True)


def scaled() -> Case:
    config, weights, semantics = zlab(
        dflash_config={
            "input_embedding_scale": 3.5,
            "final_logit_softcapping": 20.0,
            "output_multiplier": 0.5,
        }
    )
    return config, weights, replace(semantics, embedding_scale=3.5)


def prefixed() -> Case:
    config, weights, semantics = zlab()
    return config, {f"model.{k}": v for k, v in weights.items()}, semantics


def served_beyond(parameters: dict[str, Any]) -> Case:
    """The draft states 32 positions, the test serves 100 and more."""
    config, weights, semantics = with_rope(parameters, "rope_parameters")
    config["max_position_embeddings"] = 32
    return config, weights, replace(semantics, max_positions=32)


def specforge() -> Case:
    """What SpecForge writes: the fields of Transformers' Qwen3Config, all of them."""
    config, weights, semantics = zlab()
    config |= {
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 3,
        "dtype": "float32",
        "initializer_range": 0.02,
        "layer_types": ["full_attention"] * 2,
        "mask_token_id": MASK,
        "max_window_layers": 2,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "transformers_version": "4.57.1",
        "use_cache": True,
        "use_sliding_window": False,
    }
    return config, weights, semantics


def window_switched_off() -> Case:
    """`use_sliding_window: false`: z-lab's sliding layers stay causal and see all context."""
    config, weights, semantics = sliding_zlab(use_sliding_window=False)
    return config, weights, replace(semantics, layers=[("full", None, True), ("full", None, False)])


def sliding_by_depth() -> Case:
    """No `layer_types`: Transformers' rule, sliding from layer `max_window_layers` on."""
    config, weights, semantics = zlab(
        use_sliding_window=True, sliding_window=12, max_window_layers=1
    )
    return config, weights, replace(semantics, layers=[("full", None, False), ("zlab", 12, True)])


def all_sliding() -> Case:
    """`use_swa` with a window of its own."""
    config, weights, semantics = zlab(dflash_config={"use_swa": True, "swa_window_size": 10})
    return config, weights, replace(semantics, layers=[("zlab", 10, True)] * 2)


def last_layer() -> Case:
    config, weights, semantics = zlab(dflash_config={"target_layer_ids": [1, 3]})
    return config, weights, replace(semantics, hidden_state_ids=[2, 4])


def speculators_last_layer() -> Case:
    config, weights, semantics = speculators(aux_hidden_state_layer_ids=[2, 4])
    return config, weights, replace(semantics, hidden_state_ids=[2, 4])


def default_ids() -> Case:
    config, weights, semantics = zlab(num_hidden_layers=2)
    del config["dflash_config"]["target_layer_ids"]
    return config, weights, replace(semantics, hidden_state_ids=[2, 2])


CASES: dict[str, Callable[[], Case]] = {
    "zlab": zlab,
    "zlab model. prefix": prefixed,
    "zlab sliding": sliding_zlab,
    "zlab sliding not causal": lambda: sliding_zlab(causal=False),
    "zlab causal": lambda: sliding_zlab(causal=True),
    "zlab window 8": lambda: sliding_zlab(window=8),
    "zlab attention bias": biased,
    "zlab mask embedding": lambda: masked(False),
    "zlab mask embedding in a dict": lambda: masked(True),
    "zlab sample_from_anchor": lambda: from_anchor("zlab"),
    "zlab scale, cap, multiplier": scaled,
    "zlab yarn": lambda: with_rope(YARN, "rope_scaling"),
    "zlab yarn by type": lambda: with_rope(YARN, "type"),
    "zlab yarn in rope_parameters": lambda: with_rope(YARN, "rope_parameters"),
    "zlab llama3": lambda: with_rope(LLAMA3, "rope_scaling"),
    "zlab linear": lambda: with_rope(LINEAR, "rope_parameters"),
    "zlab yarn of Kimi": lambda: with_rope(KIMI, "type"),
    "zlab yarn of gpt-oss": lambda: with_rope(GPT_OSS, "rope_scaling"),
    "zlab rope by layer type": per_type_rope,
    "zlab beyond its positions": lambda: served_beyond({"rope_type": "default"} | PLAIN),
    "zlab linear beyond its positions": lambda: served_beyond(LINEAR),
    "zlab yarn beyond its positions": lambda: served_beyond(SHORT_YARN),
    "zlab window switched off": window_switched_off,
    "zlab sliding by depth": sliding_by_depth,
    "zlab use_swa": all_sliding,
    "zlab last layer": last_layer,
    "SpecForge": specforge,
    "speculators": speculators,
    "speculators without embedding": lambda: speculators(own_embedding=False),
    "speculators draft vocabulary": lambda: speculators(draft_vocab=64),
    "speculators sample_from_anchor": lambda: from_anchor("speculators"),
    "speculators last layer": speculators_last_layer,
    "speculators sliding": lambda: sliding_speculators(non_causal=False),
    "speculators sliding not causal": lambda: sliding_speculators(non_causal=True),
}


def write(folder: Path, config: dict[str, Any], weights: dict[str, Any]) -> Path:
    extra = weights.pop("mask_embedding.pt", None)
    path = write_draft(folder, config, weights)
    if extra is not None:
        torch.save(extra, path / "mask_embedding.pt")
    return path


@pytest.fixture(scope="module")
def model(target: str) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


def agreement(
    target: str,
    model: Qwen3ForCausalLM,
    path: Path,
    weights: dict[str, Any],
    semantics: Semantics,
    page: int,
    tokens: int,
) -> list[bool]:
    """For each step of a request: did we draft what the reference drafts?"""
    ids = prompt(31, 40)
    with InProcess(target, str(path), page_size=page) as engine:
        steps = trace(engine, ids, tokens)
    own = {k.removeprefix("model."): v for k, v in weights.items()}
    return [
        block[1:] == draft_block(model, semantics, own, ids + output) for output, block in steps
    ]


@pytest.mark.parametrize("page", [1, pytest.param(16, marks=pytest.mark.full)])
@pytest.mark.parametrize("case", CASES)
def test_drafts_equal_the_reference(
    target: str, model: Qwen3ForCausalLM, tmp_path: Path, case: str, page: int
) -> None:
    config, weights, semantics = CASES[case]()
    path = write(tmp_path, config, weights)
    tokens = TOKENS if case in ("zlab", "speculators", "zlab sliding") else 60
    agreed = agreement(target, model, path, weights, semantics, page, tokens)
    assert len(agreed) > 10
    assert all(agreed)


def drafts_of_rank(
    rank: int, target: str, page: int, drafts: list[tuple[str, int]], results: Any
) -> None:
    """One of two processes that serve drafts (path, port) together: what its rank drafts."""
    for path, port in drafts:
        flags = {"tp_size": 2, "tp_rank": rank, "nccl_port": port, "page_size": page}
        with InProcess(target, path, **flags) as engine:
            vocabulary = engine.worker.draft_model_runner.model.vocabulary
            vocabulary.lm_head.weight.data[vocabulary._columns :] = 1e4  # rows that pad
            results.put((path, rank, trace(engine, prompt(31, 40), 60)))


def traces_of_two_ranks(target: str, page: int, paths: list[str]) -> dict[tuple[str, int], Any]:
    """(path, rank) -> its trace."""
    context = multiprocessing.get_context("spawn")
    results, drafts = context.Queue(), [(path, free_port()) for path in paths]
    ranks = [
        context.Process(
            target=drafts_of_rank, args=(rank, target, page, drafts, results), daemon=True
        )
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    found = {}
    try:
        for _ in range(2 * len(paths)):
            path, rank, steps = results.get(timeout=500)
            found[path, rank] = steps
    finally:
        for process in ranks:
            process.join(timeout=20)
            process.kill()
    return found


@pytest.mark.parametrize(
    ("page", "cases"),
    [
        (16, ["zlab", "speculators draft vocabulary"]),
        pytest.param(16, list(CASES), marks=pytest.mark.full),
        pytest.param(1, list(CASES), marks=pytest.mark.full),
    ],
    ids=["16-two", "16-all", "1-all"],
)
def test_two_ranks_draft_what_the_reference_drafts(
    target: str, model: Qwen3ForCausalLM, tmp_path: Path, page: int, cases: list[str]
) -> None:
    """TP 2 on gloo: both ranks' draft tokens, step by step."""
    made = {str(tmp_path / str(i)): CASES[case]() for i, case in enumerate(cases)}
    for path, (config, weights, _) in made.items():
        write(Path(path), config, weights)
    traces = traces_of_two_ranks(target, page, list(made))
    for path, (_, weights, semantics) in made.items():
        assert traces[path, 0] == traces[path, 1]
        assert len(traces[path, 0]) > 10
        own = {k.removeprefix("model."): v for k, v in weights.items()}
        for output, block in traces[path, 0]:
            drafts = draft_block(model, semantics, own, prompt(31, 40) + output)
            assert block[1:] == drafts


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
    "no anchor": ("zlab sample_from_anchor", lambda s: replace(s, sample_from_anchor=False)),
    "no scale": ("zlab scale, cap, multiplier", lambda s: replace(s, embedding_scale=1.0)),
    "no mask embedding": ("zlab mask embedding", lambda s: replace(s, mask_embedding=None)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_reading_is_noticed(
    target: str, model: Qwen3ForCausalLM, tmp_path: Path, mutant: str
) -> None:
    """The control: the oracle of the test above tells a wrong reading from the right one."""
    case, mutate = MUTANTS[mutant]
    config, weights, semantics = CASES[case]()
    path = write(tmp_path, config, weights)
    assert not all(agreement(target, model, path, weights, mutate(semantics), 1, 60))


def test_a_dropped_map_is_refused_or_noticed(
    target: str, model: Qwen3ForCausalLM, tmp_path: Path
) -> None:
    """d2t left out: the drafts differ; d2t that does not fit t2d: refused."""
    config, weights, semantics = speculators(draft_vocab=64)
    path = write(tmp_path / "a", config, weights)
    dropped = {k: v for k, v in weights.items() if k != "d2t"}
    assert not all(agreement(target, model, path, dropped, semantics, 1, 30))


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
