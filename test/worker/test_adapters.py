"""LoRA adapters on the target: any of them and none in a batch, each with its own answers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput, UnloadLoRAAdapterReqInput
from sglang.srt.server_args import ServerArgs
from transformers import Qwen3ForCausalLM

from sglang_dflash.errors import Refusal
from sglang_dflash.settings.options import DRAFT_AHEAD, VERIFY_WIDTH
from test.adapters import adapter_id, merged, vocabulary_of, write_adapter
from test.arguments import arguments
from test.checkpoints import draft_config, draft_weights, prompt, write_draft
from test.cuts import verify_any_rows
from test.forced import Forced
from test.inprocess import InProcess
from test.precision import LOGPROB_BOUND
from test.reference import Semantics, draft_block
from test.targets import write
from test.worker.conftest import facts, force

LONG = {"max_new_tokens": 30, "ignore_eos": True}
SEEDED = LONG | {"temperature": 0.8, "sampling_seed": 5}
SHARED = prompt(40, 37)
Asked = tuple[str | None, list[int], dict[str, Any]]  # adapter, prompt and options
ASKED: list[Asked] = [
    ("wide", SHARED, LONG),
    (None, SHARED, LONG),
    ("narrow", SHARED, SEEDED),
    ("wide", SHARED + prompt(41, 9), LONG | {"return_logprob": True}),
    (None, prompt(42, 3), SEEDED),
    ("narrow", SHARED + prompt(43, 5), LONG | {"frequency_penalty": 0.6}),
]


@pytest.fixture(scope="module")
def folder(target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    write_adapter(folder / "wide", Path(target), rank=16, vocabulary=("embed_tokens",))
    write_adapter(folder / "narrow", Path(target), rank=4, seed=1)
    return folder


def flags(folder: Path) -> dict[str, Any]:
    paths = [f"{name}={folder / name}" for name in ("wide", "narrow")]
    return {
        "lora_paths": paths,
        "max_loras_per_batch": 3,
        "enable_deterministic_inference": True,
        "disable_overlap_schedule": True,
    }


def add(engine: InProcess, asked: Asked) -> Any:
    name, ids, options = asked
    return engine.add(ids, lora_id=adapter_id(engine, name), **options)


@pytest.fixture(scope="module")
def answers(target: str, folder: Path) -> list[dict[str, Any]]:
    return answered(target, folder)


def answered(target: str, folder: Path) -> list[dict[str, Any]]:
    """Each request alone, without speculation."""
    given = []
    with InProcess(target, **flags(folder), disable_radix_cache=True) as engine:
        for asked in ASKED:
            req = add(engine, asked)
            engine.run(req)
            given.append(facts(req))
    return given


def test_adapters_change_answers(answers: list[dict[str, Any]]) -> None:
    """Otherwise the tests below could not fail."""
    assert answers[0]["ids"][:8] != answers[1]["ids"][:8]


def forced_at_random(engine: InProcess) -> Forced:
    rng = random.Random(2)
    return force(engine, lambda _: rng.randint(0, 7))


def served(engine: InProcess, forced: Forced, answers: list[dict[str, Any]]) -> list[Any]:
    """Serve all requests, which join one after another."""
    reqs = []
    for asked, answer in zip(ASKED, answers, strict=True):
        reqs.append(add(engine, asked))
        forced.truth[reqs[-1].rid] = answer["ids"]
        for _ in range(2):
            engine.step()
    engine.run(*reqs)
    return reqs


KINDS: list[Any] = [
    {},
    {"width": "3", "page_size": 16, "chunked_prefill_size": 16, "ahead": "on"},
    {"width": "full", "ahead": "on", "max_loras_per_batch": 2},
    pytest.param({"width": "any rows", "ahead": "on"}, marks=pytest.mark.ci),
    pytest.param({"width": "any rows", "max_loras_per_batch": 2}, marks=pytest.mark.ci),
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_equals_target(
    target: str,
    draft: str,
    folder: Path,
    answers: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    kind: dict[str, Any],
) -> None:
    kind = dict(kind)
    width = kind.pop("width", "auto")
    monkeypatch.setenv(VERIFY_WIDTH, "auto" if width == "any rows" else width)
    monkeypatch.setenv(DRAFT_AHEAD, kind.pop("ahead", "off"))
    with InProcess(target, draft, **flags(folder) | kind) as engine:
        if width == "any rows":
            verify_any_rows(engine.worker)
        reqs = served(engine, forced_at_random(engine), answers)
    assert_equal(reqs, answers)


def test_step_times_are_those_of_adapters(
    target: str, draft: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are measured with adapters that work, which are in their buffers from then on."""
    for width, expected in (("auto", {"wide", "narrow"}), ("full", set())):
        monkeypatch.setenv(VERIFY_WIDTH, width)
        with InProcess(target, draft, **flags(folder)) as engine:
            in_buffers = engine.worker.model_runner.lora_manager.memory_pool.uid_to_buffer_id
            names = ("wide", "narrow")
            assert {name for name in names if adapter_id(engine, name) in in_buffers} == expected


@pytest.mark.ci
@pytest.mark.parametrize("radix", [True, False])
def test_hybrid_target(tmp_path: Path, radix: bool) -> None:
    """Adapters on its full and its linear attention; states in the radix cache are each one's."""
    write(tmp_path / "target", "Qwen3_5ForConditionalGeneration")
    write_draft(tmp_path / "draft", draft_config(), draft_weights(draft_config()))
    for seed, (name, rank) in enumerate([("wide", 16), ("narrow", 4)]):
        write_adapter(tmp_path / name, tmp_path / "target", rank, seed=seed)
    answers = answered(str(tmp_path / "target"), tmp_path)
    assert answers[0]["ids"][:8] != answers[1]["ids"][:8]
    paths = str(tmp_path / "target"), str(tmp_path / "draft")
    with InProcess(*paths, **flags(tmp_path), disable_radix_cache=not radix) as engine:
        forced = forced_at_random(engine)
        reqs, again = (served(engine, forced, answers) for _ in range(2))
    assert_equal(reqs, answers)
    assert_equal(again, answers)
    assert any(req.cached_tokens for req in again) == radix


def assert_equal(reqs: list[Any], answers: list[dict[str, Any]]) -> None:
    for req, answer in zip(reqs, answers, strict=True):
        found = facts(req)
        if answer["logprobs"] is not None:
            assert found["logprobs"] == pytest.approx(answer["logprobs"], abs=LOGPROB_BOUND)
        assert {**found, "logprobs": None} == {**answer, "logprobs": None}


def test_drafts_read_the_adapted_target(target: str, draft: str, folder: Path) -> None:
    """The states are those of the target with the adapter, the embedding is the base's."""
    base, blocks = Qwen3ForCausalLM.from_pretrained(target), []
    with InProcess(target, draft, **flags(folder)) as engine:
        propose = engine.worker.drafter.propose

        def recorded(batch: Any, *where: Any) -> Any:
            block = propose(batch, *where)
            blocks.append((int(block.positions[0, 0]), block.token_ids[0].tolist()))
            return block

        engine.worker.drafter.propose = recorded
        req = add(engine, ASKED[0])
        engine.run(req)
        ids = list(req.origin_input_ids) + list(req.output_ids)
    model, config = merged(Path(target), folder / "wide"), draft_config()
    weights = draft_weights(config) | vocabulary_of(base)
    assert len(blocks) > 3
    for at, tokens in blocks:
        drafts = draft_block(model, Semantics.of_zlab(config), weights, ids[: at + 1])
        assert tokens == [ids[at], *drafts]


def test_prefixes_are_hit_by_their_own_adapter(target: str, draft: str, folder: Path) -> None:
    with InProcess(target, draft, **flags(folder)) as engine:
        for name in ("wide", "narrow", None):
            for hit in (0, len(SHARED)):
                req = add(engine, (name, SHARED + prompt(44, 1), LONG))
                engine.run(req)
                assert req.cached_tokens == hit


def test_loading_while_serving(
    target: str, draft: str, folder: Path, answers: list[dict[str, Any]]
) -> None:
    """An adapter comes, takes the place of another one, and goes."""
    given = flags(folder)
    given["lora_paths"] = given["lora_paths"][:1]
    given |= {"max_loras_per_batch": 2, "max_lora_rank": 16}
    with InProcess(target, draft, **given) as engine:
        forced = forced_at_random(engine)
        for _ in range(2):
            ref = LoRARef(lora_name="narrow", lora_path=str(folder / "narrow"), pinned=False)
            load = LoadLoRAAdapterReqInput(**vars(ref))
            loaded = engine.scheduler.load_lora_adapter(load)
            assert loaded.success, loaded.error_message
            reqs = served(engine, forced, answers)
            for req, answer in zip(reqs, answers, strict=True):
                assert facts(req)["ids"] == answer["ids"]
            unload = UnloadLoRAAdapterReqInput(lora_name="narrow", lora_id=ref.lora_id)
            assert engine.scheduler.unload_lora_adapter(unload).success


def lora(target: str, draft: str, **given: Any) -> ServerArgs:
    return arguments(target, draft, **{"enable_lora": True, "device": "cpu"} | given)


@pytest.mark.parametrize(
    "given", [{"lora_backend": "triton"}, {"enable_lora_overlap_loading": True}], ids=str
)
def test_refused_flags(target: str, draft: str, given: dict[str, Any]) -> None:
    with pytest.raises(Refusal, match=next(iter(given)).replace("_", "-")):
        lora(target, draft, **given)


def test_adapted_experts_are_refused(draft: str, tmp_path: Path) -> None:
    write(tmp_path, "Qwen3MoeForCausalLM")
    modules = ["gate_proj", "up_proj", "down_proj"]
    given: dict[str, Any] = {
        "enable_lora": True,
        "max_lora_rank": 2,
        "lora_target_modules": modules,
    }
    with pytest.raises(Refusal, match="experts"):
        InProcess(str(tmp_path), draft, **given)


def test_adapted_heads_are_refused(target: str, draft: str, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "head", Path(target), rank=2, vocabulary=("lm_head",))
    with pytest.raises(Refusal, match="lm_head"):
        InProcess(target, draft, lora_paths=[str(path)])


def test_wrong_weights_are_refused_at_the_start(target: str, draft: str, tmp_path: Path) -> None:
    """`test/server/test_adapters_over_http.py` loads many more while a server runs."""
    path = write_adapter(tmp_path / "wrong", Path(target), rank=4)
    config = path / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"r": 5}))
    with pytest.raises(Refusal, match="wrong do not fit its config and the target"):
        InProcess(target, draft, lora_paths=[str(path)])
