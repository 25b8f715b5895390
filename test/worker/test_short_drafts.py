"""Drafts of fewer masks than a whole block, where the draft was trained for it."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang_dflash.core.width import StepTimes
from sglang_dflash.cpu.widths import Outlook
from sglang_dflash.flags import VERIFY_WIDTH as VARIABLE
from test.checkpoints import draft_config, draft_weights, write_draft
from test.inprocess import InProcess
from test.worker.conftest import facts, force, prompt, without_graphs


def any_size_draft(folder: Path, **method: object) -> str:
    """The small draft, said to be trained on blocks of any size."""
    config = draft_config(dflash_config={"variable_block_size": True} | method)
    return str(write_draft(folder, config, draft_weights(config)))


@pytest.fixture(scope="module")
def any_size(tmp_path_factory):
    return any_size_draft(tmp_path_factory.mktemp("any"))


def set_times(engine):
    """Times of steps in place of the measured ones: positions of a draft cost most."""
    widths = engine.worker.best_widths
    widths._drafting = StepTimes({(1, 1): 0.1, (1, 8): 0.8}, range(1, 9))
    widths._verifying = StepTimes({(1, 1): 0.2, (1, 8): 0.4}, range(1, 9))


def watch_drafts(engine):
    """How many positions of each request the draft reads, a list a forward."""
    runner, held = engine.worker.draft_model_runner, []
    forward = runner.forward

    def watched(batch, *args, **kwargs):
        held.append(batch.spec_info.lens)
        assert sum(held[-1]) == len(batch.input_ids) == len(batch.out_cache_loc)
        return forward(batch, *args, **kwargs)

    runner.forward = watched
    return held


def test_outlook_follows_each_request():
    """It learns what a request's drafts are worth, forgets with the row, and keeps what it saw."""
    outlook, rows = Outlook(rows=4, block_size=4), np.array([3, 1])
    outlook.forget(rows)
    new = [0.9, 0.81, 0.729]
    np.testing.assert_allclose(outlook(rows), [new, new], rtol=1e-6)
    survival = np.array([[0.9, 0.8, 0.8], [0.2, 0.0, 0.0]], dtype=np.float32)
    drafted = np.array([[True, True, True], [True, False, False]])
    for _ in range(50):
        outlook.observe(rows, survival, drafted)
    good, bad = outlook(rows)
    assert good.tolist() == pytest.approx([0.9, 0.8, 0.8], abs=0.05)
    assert bad.tolist() == pytest.approx([0.26, 0.24, 0.21], abs=0.02)  # not seen counts as good
    for _ in range(200):  # drafted again some time, though a bad stretch had ended its drafts
        outlook.observe(rows, survival * [[1, 0, 0]], np.array([[True, False, False]] * 2))
    np.testing.assert_allclose(outlook(rows)[0], [0.9, 0.81, 0.729], rtol=0.02)
    outlook.observe(rows, survival, drafted)
    good = outlook(rows)[0]
    outlook.forget(rows[1:])
    np.testing.assert_allclose(outlook(rows), [good, new], rtol=1e-6)


def test_the_drafts_own_probability(target, any_size, monkeypatch):
    """What `auto` learns from: the softmax of the logits whose argmax is the draft; else 0."""
    monkeypatch.setenv(VARIABLE, "auto")
    with InProcess(target, any_size) as engine:
        without_graphs(engine)
        set_times(engine)
        worker = engine.worker
        model, seen = worker.draft_model_runner.model, []
        predict = model.vocabulary.predict

        def recorded(hidden, weigh):
            logits = hidden @ model.vocabulary.lm_head.weight[:160].T
            seen.append(logits.softmax(-1).max(-1))
            return predict(hidden, weigh)

        model.vocabulary.predict = recorded
        blocks = []
        widths = worker.best_widths
        verify = widths.to_verify
        widths.to_verify = lambda block, rows: blocks.append(block) or verify(block, rows)
        engine.generate(prompt(310, 12), max_new_tokens=30, ignore_eos=True)
    assert min(len(best.values) for best in seen) < 8
    for block, best in zip(blocks, seen, strict=True):
        drafted = len(best.values) - 1  # the anchor's row predicts nothing
        probability = block.probability[0, :drafted]
        torch.testing.assert_close(probability, best.values[1:], atol=2e-6, rtol=0)
        assert not block.probability[0, drafted:].any()
        assert block.token_ids[0, 1 : 1 + drafted].tolist() == best.indices[1:].tolist()


@pytest.mark.parametrize("page", [1, 16])
def test_equals_target_with_short_drafts(target, any_size, alone, monkeypatch, page):
    """No block is cut by the test: what each request drafts is what has paid so far."""
    monkeypatch.setenv(VARIABLE, "auto")
    rng = random.Random(9)
    asked = [(prompt(350 + i, 20), {"max_new_tokens": 50, "ignore_eos": True}) for i in range(6)]
    expected = alone(asked)
    with InProcess(target, any_size, page_size=page) as engine:
        forced = force(engine, lambda _: rng.randint(0, 7))
        held = watch_drafts(engine)
        set_times(engine)
        reqs = []
        for (ids, options), truth in zip(asked, expected, strict=True):
            reqs.append(engine.add(ids, **options))  # the others draft less by then
            forced.truth[reqs[-1].rid] = truth["ids"]
            engine.step()
            engine.step()
        engine.run(*reqs)
        assert [facts(req) for req in reqs] == expected
        assert all(req.spec_num_correct_drafts > 0 for req in reqs)
    assert any(len(set(lens)) > 1 for lens in held)


@pytest.mark.parametrize("kind", ["plain", "sample_from_anchor", "window"])
def test_unequal_drafts_of_one_forward(target, tmp_path, monkeypatch, kind):
    """Each is the draft of the request alone, in its place; what was not drafted has 0."""
    monkeypatch.setenv(VARIABLE, "auto")
    path = any_size_draft(tmp_path, sample_from_anchor=kind == "sample_from_anchor")
    size = {"speculative_draft_window_size": 12} if kind == "window" else {}
    prompts, read = [prompt(360 + i, 9 + 7 * i) for i in range(3)], [2, 8, 5]
    with InProcess(target, path, **size) as engine:
        drafter, blocks = engine.worker.drafter, []
        propose = drafter.propose
        drafter.propose = lambda *args: blocks.append(propose(*args)) or blocks[-1]

        def drafted(prompts, read):
            engine.worker.best_widths.to_draft = lambda block, _: block.cut(np.array(read))
            blocks.clear()
            engine.run(*[engine.add(ids, max_new_tokens=2, ignore_eos=True) for ids in prompts])
            return blocks[0].token_ids, blocks[0].probability

        ids, probability = drafted(prompts, read)
        for i, (asked, positions) in enumerate(zip(prompts, read, strict=True)):
            [alone], [weighed] = drafted([asked], [positions])
            count = positions - 1 + (kind == "sample_from_anchor")
            assert (weighed > 0).tolist() == [at < count for at in range(len(weighed))]
            torch.testing.assert_close(probability[i], weighed, atol=1e-5, rtol=0)
            assert ids[i, : 1 + count].tolist() == alone[: 1 + count].tolist()


def test_drafts_shrink_where_they_are_not_accepted(target, any_size, monkeypatch):
    """The draft's own forward holds fewer rows of such a request; a new one in its row does not."""
    monkeypatch.setenv(VARIABLE, "auto")
    with InProcess(target, any_size, max_running_requests=1) as engine:
        held = watch_drafts(engine)
        widths = engine.worker.best_widths
        set_times(engine)
        to_verify, parts = widths.to_verify, []
        widths.to_verify = lambda *args: parts.append((args[0], to_verify(*args))) or parts[-1][1]
        for _ in range(2):
            start = len(held)
            engine.generate(prompt(340, 20), max_new_tokens=40, ignore_eos=True)
            assert held[start][0] > held[-1][0] >= 2
    drafted = [1 + int((block.probability > 0).sum()) for block, _ in parts]
    verified = [part.lens[0] for _, part in parts]
    assert min(drafted) < 8
    assert all(v <= d for v, d in zip(verified, drafted, strict=True))


def test_other_drafts_see_all_masks(target, draft, monkeypatch):
    """However little is verified: a draft trained on whole blocks drafts worse with fewer masks."""
    monkeypatch.setenv(VARIABLE, "auto")
    with InProcess(target, draft) as engine:
        drafted, verified = watch_drafts(engine), []
        widths = engine.worker.best_widths
        widths._verifying = StepTimes({(1, 1): 0.2, (1, 8): 40.0}, range(1, 9))
        to_verify = widths.to_verify
        widths.to_verify = lambda *args: verified.append(to_verify(*args)) or verified[-1]
        engine.generate(prompt(340, 20), max_new_tokens=40, ignore_eos=True)
    assert drafted == [[8]] * len(verified)
    assert [block.lens for block in verified[1:]] == [[1]] * (len(verified) - 1)  # 0 probes
