"""Targets with latent attention (MLA): K and V of all heads are made from one vector per token."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from sglang_dflash.cpu import shims
from sglang_dflash.cpu.limits import KV_BYTES, _bytes_bound
from sglang_dflash.settings.options import DRAFT_AHEAD, VERIFY_WIDTH
from test.arguments import arguments
from test.checkpoints import LAYERS, draft_config, draft_weights, prompt, write_draft
from test.inprocess import InProcess
from test.precision import LOGPROB_BOUND
from test.targets import LATENT, write
from test.worker.conftest import Cut, Request, each_alone, facts, join

SEEDED: dict[str, Any] = {"enable_deterministic_inference": True}
LONG = {"max_new_tokens": 40, "ignore_eos": True, "return_logprob": True}
DRAWN = LONG | {"temperature": 0.9, "top_k": 8}
SHARED = prompt(60, 40)
ASKED: list[Request] = [
    (SHARED, LONG),
    (prompt(61, 7), DRAWN | {"sampling_seed": 5}),
    (SHARED + prompt(62, 9), LONG),
    (prompt(63, 1), LONG | {"frequency_penalty": 0.6, "top_logprobs_num": 2}),
    (SHARED + prompt(64, 3), DRAWN | {"sampling_seed": 6, "top_p": 0.9}),
]
KINDS = ("DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM", "Glm4MoeLiteForCausalLM")
DENSE = {"first_k_dense_replace": LAYERS}


@dataclass
class Pair:
    target: str
    draft: str
    model: Any  # Transformers' model of the target
    answers: list[dict[str, Any]]  # without speculation, to one request at a time


def write_pair(folder: Any, architecture: str) -> Pair:
    model = write(folder / "target", architecture)
    config = draft_config()
    draft = write_draft(folder / "draft", config, draft_weights(config))
    answers = each_alone(str(folder / "target"), ASKED, **SEEDED)
    return Pair(str(folder / "target"), str(draft), model, answers)


@pytest.fixture(
    scope="module",
    params=[k if k == KINDS[0] else pytest.param(k, marks=pytest.mark.full) for k in KINDS],
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("latent"), request.param)


def check(engine: InProcess, pair: Pair) -> list[Any]:
    """The answers to all requests at once are those to each alone."""
    reqs = join(engine, ASKED, pair.answers, steps=2)
    for req, answer in zip(reqs, pair.answers, strict=True):
        got = facts(req)
        assert got["logprobs"] == pytest.approx(answer["logprobs"], abs=2 * LOGPROB_BOUND)
        assert {**got, "logprobs": None} == {**answer, "logprobs": None}
    assert sum(req.spec_num_correct_drafts for req in reqs) > 20
    return reqs


FLAGS: list[dict[str, Any]] = [
    {"page_size": 16, "chunked_prefill_size": 32},
    {},
    {"page_size": 16, "disable_radix_cache": True},
    {"chunked_prefill_size": 8},
    {"speculative_num_draft_tokens": 3},
]
WIDTHS = ["auto", "full", "4"]
CROSS = list(product(WIDTHS, ["on", "off"], FLAGS))
SOME = [("auto", "on", FLAGS[0]), ("full", "off", FLAGS[1]), ("4", "on", FLAGS[2])]


@pytest.mark.parametrize(
    ("width", "ahead", "flags"),
    [
        pytest.param(*case, marks=() if case in SOME else pytest.mark.full, id=str(case))
        for case in CROSS
        if not (case[0] == "4" and "speculative_num_draft_tokens" in case[2])
    ],
)
def test_equals_target(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, width: str, ahead: str, flags: dict[str, Any]
) -> None:
    """Tokens and logprobs, drawn and greedy, behind cached prefixes and behind chunks."""
    monkeypatch.setenv(VERIFY_WIDTH, width)
    monkeypatch.setenv(DRAFT_AHEAD, ahead)
    with InProcess(pair.target, pair.draft, **SEEDED, **flags) as engine:
        reqs = check(engine, pair)
        pools = [
            runner.token_to_kv_pool
            for runner in (engine.worker.model_runner, engine.worker.draft_model_runner)
        ]
    assert [type(pool) for pool in pools] == [MLATokenToKVPool, MHATokenToKVPool]
    assert (reqs[2].cached_tokens > 0) == (not flags.get("disable_radix_cache", False))


def test_any_part_of_a_block(pair: Pair, cut_apart: Cut) -> None:
    with InProcess(pair.target, pair.draft, **SEEDED) as engine:
        cut_apart(engine)
        check(engine, pair)


def test_transformers_says_the_same(pair: Pair) -> None:
    """The logprobs of what the target says are those of Transformers' model."""
    for (ids, options), answer in zip(ASKED, pair.answers, strict=True):
        if "sampling_seed" in options or "frequency_penalty" in options:
            continue
        with torch.no_grad():
            logits = pair.model(input_ids=torch.tensor([ids + answer["ids"]])).logits[0]
        at = range(len(ids) - 1, len(ids) + len(answer["ids"]) - 1)
        best = logits[at].log_softmax(dim=-1).max(dim=-1)
        assert best.indices.tolist() == answer["ids"]
        assert best.values.tolist() == pytest.approx(answer["logprobs"], abs=LOGPROB_BOUND)


def test_retraction(pair: Pair) -> None:
    flags: dict[str, Any] = {"max_total_tokens": 224, "schedule_conservativeness": 0.01}
    with InProcess(pair.target, pair.draft, **SEEDED, **flags) as engine:
        update = engine.scheduler.update_running_batch
        retracted: list[Any] = []

        def watched(batch: Any) -> Any:
            kept = update(batch)
            retracted.extend(req for req in engine.scheduler.waiting_queue if req.retraction_count)
            return kept

        engine.scheduler.update_running_batch = watched
        check(engine, pair)
        assert retracted


def says(pair: Pair) -> list[int]:
    with InProcess(pair.target, pair.draft) as engine:
        return engine.generate(SHARED, max_new_tokens=40, ignore_eos=True)


@pytest.mark.ci
def test_a_prefill_by_heads_is_seen(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutation: SGLang's own choice for a prefill without seeds, whose K and V are by head."""
    assert says(pair) == pair.answers[0]["ids"]
    monkeypatch.setattr(
        shims, "latent_handler", lambda original, registry, name: original(registry, name)
    )
    with pytest.raises(RuntimeError, match="size"):
        says(pair)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_default_room_counts_latent_vectors(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, tp_size: int
) -> None:
    """Every rank keeps the whole vector of a token. The draft has 2 layers of 2 heads of 32."""
    for name in ("SGLANG_CPU_OMP_THREADS_BIND", "SGLANG_NCCL_SO_PATH"):  # `arguments` sets them
        monkeypatch.setenv(name, os.environ.get(name, ""))
    args = arguments(pair.target, pair.draft, dtype="float32", tp_size=tp_size)
    latent = LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]
    assert _bytes_bound(args) == KV_BYTES // (4 * (tp_size * LAYERS * latent + 2 * 2 * 2 * 32))
