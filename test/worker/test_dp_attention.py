"""Replicas of one target (`--enable-dp-attention`), each with requests of its own, on gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import nn

from sglang_dflash.errors import Refusal
from sglang_dflash.settings.options import DRAFT_AHEAD, VERIFY_WIDTH
from sglang_dflash.targets.dp_attention import check_loaded_parts
from sglang_dflash.tools.launch import free_port
from test.arguments import arguments
from test.checkpoints import draft_config, draft_weights, prompt, write_draft
from test.inprocess import InProcess
from test.ranks import on_two_ranks
from test.targets import write
from test.worker.conftest import Request, each_alone, facts, force

OTHERS = ["Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "Qwen2MoeForCausalLM", "Qwen3ForCausalLM"]
GREEDY = {"ignore_eos": True, "max_new_tokens": 40}
CERTAIN = GREEDY | {"temperature": 0.9, "top_k": 1}  # drawn, but from one token only
BUSY: list[Request] = [(prompt(50 + i, 30 + 7 * i), CERTAIN if i % 2 else GREEDY) for i in range(5)]
QUIET: Request = (prompt(60, 3), GREEDY | {"max_new_tokens": 12})
REPLICAS: dict[str, Any] = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
LATE = 25  # turns after which the quiet replica has its request
SMALL = {"schedule_conservativeness": 0.01, "chunked_prefill_size": 64}  # 32 for each of two
POOL = {1: 256, 16: 320}  # tokens of KV by page size, so few that requests are retracted


class Said(NamedTuple):
    answers: list[dict[str, Any]]
    retracted: int
    idle: int  # forwards without a request
    blocks: list[list[list[int]]]  # that the draft proposed


def asked_of(rank: int, engine: InProcess, known: list[dict[str, Any]]) -> list[Any]:
    """The requests of a replica. Of the busy one, any number of drafts is right."""
    if rank == 1:
        return [engine.add(QUIET[0], **QUIET[1])]
    steps = iter(range(10_000))
    forced, reqs = force(engine, lambda _: next(steps) * 5 % 8), []
    for (ids, options), answer in zip(BUSY, known, strict=True):
        reqs.append(engine.add(ids, **options))
        forced.truth[reqs[-1].rid] = answer["ids"]
    return reqs


def serve(
    rank: int, target: str, draft: str, port: int | None, known: list[Any], flags: dict[str, Any]
) -> Said:
    """What a replica answers; port: None for the quiet one without another."""
    if port is not None:
        flags |= REPLICAS | {"tp_rank": rank, "nccl_port": port}
    blocks: list[list[list[int]]] = []
    idle: list[Any] = []
    reqs: list[Any] = []
    with InProcess(target, draft, **flags) as engine:
        propose, take_part = engine.worker.drafter.propose, engine.worker.verifier.idle

        def noted(*given: Any) -> Any:
            block = propose(*given)
            blocks.append(block.token_ids.tolist())
            return block

        def counted(batch: Any) -> Any:
            idle.append(batch)
            return take_part(batch)

        engine.worker.drafter.propose, engine.worker.verifier.idle = noted, counted
        turn = 0
        while engine.step() or turn <= LATE:  # all replicas take as many turns
            if turn == (LATE if rank else 0):
                reqs = asked_of(rank, engine, known)
            turn += 1
        retracted = sum(req.retraction_count for req in reqs)
        return Said([facts(req) for req in reqs], retracted, len(idle), blocks)


def pair(folder: Path, architecture: str) -> tuple[str, str]:
    write(folder / "target", architecture)
    config = draft_config()
    return str(folder / "target"), str(write_draft(folder / "draft", config, draft_weights(config)))


@pytest.mark.parametrize(
    ("architecture", "page", "ahead"),
    [
        ("DeepseekV3ForCausalLM", 1, "on"),
        pytest.param("Qwen3MoeForCausalLM", 16, "off", marks=pytest.mark.ci),
        *(pytest.param(name, 1, "off", marks=pytest.mark.full) for name in OTHERS),
    ],
)
def test_uneven_replicas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, page: int, ahead: str
) -> None:
    """One retracts and prefills in chunks. The other is idle, then has the blocks of one alone."""
    monkeypatch.setenv(VERIFY_WIDTH, "full")
    monkeypatch.setenv(DRAFT_AHEAD, ahead)
    target, draft = pair(tmp_path, architecture)
    flags = SMALL | {"max_total_tokens": POOL[page], "page_size": page}
    known = each_alone(target, BUSY)
    quiet = serve(1, target, draft, None, [], dict(flags))
    one, other = on_two_ranks(serve, target, draft, free_port(), known, dict(flags))
    assert one.answers == known
    assert one.retracted > 0
    assert other == quiet._replace(idle=other.idle)
    assert other.idle > LATE
    assert other.retracted == 0


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param("LlamaForCausalLM", marks=pytest.mark.ci),
        *(pytest.param(f"{n}ForCausalLM", marks=pytest.mark.full) for n in ("Gemma3", "Qwen2")),
    ],
)
def test_a_class_that_divides_attention_among_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """With it, SGLang itself would add up states of different tokens."""
    monkeypatch.setenv(VERIFY_WIDTH, "full")
    with pytest.raises(Refusal, match="does not divide its attention among"):
        on_two_ranks(serve, *pair(tmp_path, architecture), free_port(), [], {})


@pytest.mark.parametrize(
    ("embedding", "head", "named"), [(1, 2, None), (2, 2, None), (4, 2, "embedding"), (2, 4, "LM")]
)
def test_a_vocabulary_that_is_divided_among_all(
    target: str,
    draft: str,
    monkeypatch: pytest.MonkeyPatch,
    embedding: int,
    head: int,
    named: str | None,
) -> None:
    """Two replicas of two ranks each: the number of parts of each is 1, 2 or 4."""
    monkeypatch.setenv(VERIFY_WIDTH, "full")
    given = arguments(target, draft)  # with more ranks they set variables for all later tests
    given.tp_size, given.dp_size, given.enable_dp_attention = 4, 2, True
    loaded: Any = nn.Module()
    loaded.model, loaded.lm_head = nn.Module(), nn.Linear(2, 2)
    loaded.model.embed_tokens = nn.Embedding(2, 2)
    loaded.model.embed_tokens.tp_size, loaded.lm_head.tp_size = embedding, head
    if named is None:
        return check_loaded_parts(given, loaded)
    with pytest.raises(Refusal, match=f"does not divide its {named}"):
        check_loaded_parts(given, loaded)


@pytest.mark.ci
def test_a_target_that_reads_images(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="reads images"):
        arguments(*pair(tmp_path, "Qwen3VLForConditionalGeneration"), **REPLICAS)
