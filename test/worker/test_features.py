"""Features equal Transformers' hidden states, whatever was cached, cut into chunks or retracted."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
from transformers import Qwen3ForCausalLM

from sglang_dflash.settings.options import FEATURES, FEATURES_FORM, FORMS
from test.checkpoints import HIDDEN, draft_config, draft_weights, prompt, write_draft
from test.features import WANTED, check, read
from test.inprocess import InProcess


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where servers of this test write features."""
    path = tmp_path / "features"
    path.mkdir()
    monkeypatch.setenv(FEATURES, str(path))
    return path


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("page", "chunk"), [(1, None), pytest.param(16, 32, marks=pytest.mark.ci)])
def test_features_of_requests(
    target: str,
    draft: str,
    model: Qwen3ForCausalLM,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    page: int,
    chunk: int | None,
) -> None:
    """Beside others that do not ask, and with all of a prompt in the cache."""
    monkeypatch.setenv(FEATURES_FORM, form)
    ids = prompt(91, 70)
    with InProcess(target, draft, page_size=page, chunked_prefill_size=chunk) as engine:
        plain = engine.generate(ids, max_new_tokens=40, ignore_eos=True)
        asked = [engine.add(ids[:n], max_new_tokens=m, **WANTED) for n, m in ((70, 40), (35, 4))]
        other = engine.add(ids, max_new_tokens=40, ignore_eos=True)
        engine.run(*asked, other)
        assert list(other.output_ids) == plain
        assert other.cached_tokens > 0
        for req in asked:
            assert req.cached_tokens == 0
            output = list(req.output_ids_through_stop)
            check(model, read(folder, req.rid, form), list(req.origin_input_ids), output, form)
        assert len(list(folder.iterdir())) == len(asked)


def test_an_id_that_comes_again(
    target: str, draft: str, model: Qwen3ForCausalLM, folder: Path
) -> None:
    """It gets features of its own, of weights that the target has by then."""
    ids = prompt(97, 30)
    with InProcess(target, draft) as engine:
        first = engine.add(ids, max_new_tokens=9, rid="twice", **WANTED)
        engine.run(first)
        check(model, read(folder, "twice"), ids, list(first.output_ids_through_stop))
        (folder / "twice.safetensors").unlink()
        changed = 2 + model.model.norm.weight.detach().flip(0)
        loaded = [("model.norm.weight", changed)]
        request = UpdateWeightsFromTensorReqInput([pickle.dumps(loaded)], flush_cache=False)
        assert engine.scheduler.weight_updater.update_weights_from_tensor(request).success
        again = engine.add(ids, max_new_tokens=9, rid="twice", **WANTED)
        engine.run(again)
    other = copy.deepcopy(model)
    other.model.norm.weight.data.copy_(changed)
    check(other, read(folder, "twice"), ids, list(again.output_ids_through_stop))


def test_a_folder_that_takes_no_file(
    target: str, draft: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The answer comes, and the log says so."""
    with InProcess(target, draft) as engine:
        (folder / ".full.safetensors.part").mkdir()
        req = engine.add(prompt(98, 20), max_new_tokens=9, rid="full", **WANTED)
        engine.run(req)
        done = engine.add(prompt(98, 20), max_new_tokens=9, **WANTED)
        engine.run(done)
        assert len(read(folder, done.rid)["input_ids"]) > 20
        assert req.finished_reason.to_json()["type"] == "length"
    assert "features of request full are not written" in capfd.readouterr().err


def test_the_last_layer_is_a_feature(
    target: str, model: Qwen3ForCausalLM, folder: Path, tmp_path: Path
) -> None:
    config = draft_config(dflash_config={"target_layer_ids": [1, 3]})
    path = write_draft(tmp_path / "draft", config, draft_weights(config))
    with InProcess(target, str(path)) as engine:
        req = engine.add(prompt(92, 20), max_new_tokens=20, **WANTED)
        engine.run(req)
        output = list(req.output_ids_through_stop)
    found = read(folder, req.rid)
    check(model, found, prompt(92, 20), output, FORMS[0], layers=(2, 4))


@pytest.mark.ci
def test_a_retracted_request(
    target: str, draft: str, model: Qwen3ForCausalLM, folder: Path
) -> None:
    with InProcess(target, draft, max_total_tokens=768, schedule_conservativeness=0.01) as engine:
        reqs = [
            engine.add(prompt(93 + i, 60), max_new_tokens=200, ignore_eos=True, **WANTED)
            for i in range(6)
        ]
        engine.run(*reqs)
        assert any(req.retraction_count for req in reqs)
    for req in reqs:
        output = list(req.output_ids_through_stop)
        check(model, read(folder, req.rid), list(req.origin_input_ids), output, FORMS[0])


def test_an_aborted_request_has_none(target: str, draft: str, folder: Path) -> None:
    with InProcess(target, draft) as engine:
        req = engine.add(prompt(94, 20), max_new_tokens=200, ignore_eos=True, **WANTED)
        for _ in range(3):
            engine.step()
        engine.abort(req)
        engine.run(req)
        done = engine.add(prompt(95, 20), max_new_tokens=9, **WANTED)
        engine.run(done)
    assert len(read(folder, done.rid)["input_ids"]) > HIDDEN // 8
    assert len(list(folder.iterdir())) == 1


def test_requests_that_cannot_have_them(
    target: str, draft: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with InProcess(target, draft) as engine:
        refused = engine.add(prompt(96, 9), rid="../outside", **WANTED)
        engine.run(refused)
        assert "rid" in refused.finished_reason.message
    monkeypatch.delenv(FEATURES)
    with InProcess(target, draft) as engine:
        refused = engine.add(prompt(96, 9), **WANTED)
        engine.run(refused)
        assert "--speculative-dflash-features" in refused.finished_reason.message
    assert not list(folder.iterdir())
