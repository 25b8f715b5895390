"""--speculative-dflash-verify-width: any part of a block may be verified, the output stays."""

from __future__ import annotations

import inspect
import itertools
import math
import random
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_dflash.core.width import StepTimes, Survival, best_width
from sglang_dflash.cpu.widths import Outlook, best_widths
from sglang_dflash.errors import Refusal
from sglang_dflash.flags import DRAFT_AHEAD, verify_widths
from sglang_dflash.flags import VERIFY_WIDTH as VARIABLE
from sglang_dflash.hooks import meta_info
from sglang_dflash.runtime.state import DFlashBlock
from test.checkpoints import draft_config, draft_weights, write_draft
from test.inprocess import InProcess
from test.worker.conftest import facts, force, prompt, verify_parts, without_graphs
from test.worker.test_draft import draft_kv


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


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("width", ["2", "5", "auto", "any"])
def test_equals_target(target, draft, alone, monkeypatch, width, page, cut_apart):
    monkeypatch.setenv(VARIABLE, "auto" if width == "any" else width)
    rng = random.Random(4)
    asked = [(prompt(300 + i, 20), {"max_new_tokens": 50, "ignore_eos": True}) for i in range(6)]
    expected = alone(asked)

    with InProcess(target, draft, page_size=page) as engine:
        forced = force(engine, lambda _: rng.randint(0, 7))
        reqs = [engine.add(ids, **options) for ids, options in asked]
        forced.truth = {req.rid: e["ids"] for req, e in zip(reqs, expected, strict=True)}
        if width == "any":
            cut_apart(engine)
        engine.run(*reqs)
        assert [facts(req) for req in reqs] == expected
        if width.isdecimal():
            for req in reqs:
                histogram = req.spec_correct_drafts_histogram
                assert sum(histogram[int(width) : 8]) == 0
                assert histogram[8] == req.spec_verify_ct * (int(width) - 1)
                assert sum(histogram[:8]) == req.spec_verify_ct


def test_context_kv_of_requests_cut_apart(target, draft, alone, monkeypatch):
    """After steps of unequal widths, the draft's KV is what a prefill of the same tokens gives."""
    monkeypatch.setenv(VARIABLE, "auto")
    rng = random.Random(6)
    asked = [(prompt(320 + i, 9 + i), {"max_new_tokens": 60, "ignore_eos": True}) for i in range(4)]
    expected = alone(asked)
    seen = []
    with InProcess(target, draft) as engine:
        forced = force(engine, lambda _: rng.randint(0, 7))
        reqs = [engine.add(ids, **options) for ids, options in asked]
        forced.truth = {req.rid: e["ids"] for req, e in zip(reqs, expected, strict=True)}
        widths = lambda block: [8, *(rng.randint(1, 7) for _ in block.slots[1:])]  # noqa: E731
        verify_parts(engine, lambda block: block.cut(np.array(widths(block))))
        for _ in range(8):
            engine.step()
        for req in reqs:
            tokens = [*req.origin_input_ids, *req.output_ids][:-1]
            seen.append((tokens, draft_kv(engine, req.req_pool_idx, len(tokens))))
            assert not req.finished()
        engine.run(*reqs)
    with InProcess(target, draft) as engine:
        for tokens, kv in seen:
            engine.scheduler.flush_cache()
            req = engine.add(tokens, max_new_tokens=8, ignore_eos=True)
            while not req.output_ids:
                engine.step()
            fresh = draft_kv(engine, req.req_pool_idx, len(tokens))
            torch.testing.assert_close(kv, fresh, atol=1e-4, rtol=0)
            engine.run(req)


def test_survival_learns_from_unequal_widths():
    """A draft behind a request's cut is neither right nor wrong."""
    said, accepted, widths = np.full((2, 3), 0.9), np.array([2, 1]), np.array([4, 2])
    one, both = Survival(4), Survival(4)
    both.observe(said, accepted, widths)
    one.observe(said[:1], accepted[:1], widths[:1])
    one._tried[0] += one._right[0]  # the second request: its only draft, right
    one._right[0] *= 2
    np.testing.assert_allclose(both(said), one(said), rtol=1e-6)


def test_a_probability_that_is_no_number_counts_as_0(target, draft, monkeypatch):
    monkeypatch.setenv(VARIABLE, "auto")
    with InProcess(target, draft) as engine:
        without_graphs(engine)
        model, blocks = engine.worker.draft_model_runner.model, []
        predict = model.vocabulary.predict
        lost = torch.tensor(float("nan")).long()

        def garbled(hidden, weigh):
            predicted = predict(hidden, weigh)
            predicted[:, 1] = lost
            return predicted

        model.vocabulary.predict = garbled
        widths = engine.worker.best_widths
        verify = widths.to_verify
        widths.to_verify = lambda block, rows: blocks.append(block) or verify(block, rows)
        output = engine.generate(prompt(330, 12), max_new_tokens=12, ignore_eos=True)
    assert len(output) == 12
    assert not any(block.probability.any() for block in blocks)


def test_one_width_for_all_where_a_probability_is_no_number(target, draft, monkeypatch):
    """Where widths are not apart, as on CUDA, one on offer is chosen all the same."""
    monkeypatch.setenv(VARIABLE, "auto")
    with InProcess(target, draft) as engine:
        widths = engine.worker.best_widths
        times = {(1, width): 1.0 + width for width in (2, 4, 8)}
        widths._apart, widths._verifying = False, StepTimes(times, (2, 4, 8))
        widths._drafting = StepTimes({(1, 8): 1.0}, (8,))
        zeros = torch.zeros(1, 8, dtype=torch.int64)
        block = DFlashBlock(
            zeros, zeros, zeros, torch.tensor([[0.9, 0.9, 0.9, 0.0, 0.9, 0.9, 0.9]])
        )
        rows = torch.tensor([0])
        chosen = [widths.to_verify(block, rows).draft_token_num for _ in range(2)]
    assert chosen == [8, 4]  # the first probes


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


@pytest.mark.parametrize(
    ("asked", "on_cpu", "on_cuda"),
    [
        (None, tuple(range(1, 9)), (8,)),
        ("auto", tuple(range(1, 9)), (2, 4, 6, 8)),
        ("full", (8,), (8,)),
        ("3", (3,), (3,)),
    ],
)
def test_widths_on_offer(monkeypatch, asked, on_cpu, on_cuda):
    """On CUDA a width costs graphs, so fewer are on offer, and only where asked for."""
    monkeypatch.delenv(VARIABLE)
    if asked is not None:
        monkeypatch.setenv(VARIABLE, asked)
    for device, expected in (("cpu", on_cpu), ("cuda", on_cuda)):
        args = Namespace(device=device, speculative_num_draft_tokens=8)
        assert verify_widths(args) == expected


def test_every_width_has_its_own_attention_backend(target, draft, monkeypatch):
    """Made while the server arguments say that width, and the one that a forward of it runs on."""
    monkeypatch.setenv(VARIABLE, "auto")
    made = []
    make = ModelRunner._get_attention_backend

    def noted(runner, *args, **kwargs):
        backend = make(runner, *args, **kwargs)
        if not runner.is_draft_worker:
            made.append((runner.server_args.speculative_num_draft_tokens, backend))
        return backend

    monkeypatch.setattr(ModelRunner, "_get_attention_backend", noted)
    with InProcess(target, draft) as engine:
        runner, ran = engine.worker.model_runner, []
        assert runner.server_args.speculative_num_draft_tokens == 8
        assert sorted(width for width, _ in made) == list(range(1, 9))
        forward = runner.forward

        def watched(batch, *args, **kwargs):
            if batch.forward_mode.is_target_verify():
                ran.append((batch.spec_info.draft_token_num, runner.attn_backend))
            return forward(batch, *args, **kwargs)

        runner.forward = watched
        rng = random.Random(5)
        verify_parts(engine, lambda block: block.first(rng.randint(1, 8)))
        engine.generate(prompt(311, 12), max_new_tokens=60, ignore_eos=True)
    assert len({width for width, _ in ran}) > 3
    assert all(backend is dict(made)[width] for width, backend in ran)


def test_graphs_of_a_width_are_made_as_sglang_makes_them():
    """What `Widths` hands to SGLang's graph runner, which only a GPU can construct."""
    inspect.signature(CudaGraphRunner).bind(None, attn_backend=None)


@pytest.mark.parametrize("width", ["1", "9", "half", ""])
def test_refused(target, draft, monkeypatch, width):
    monkeypatch.setenv(VARIABLE, width)
    with pytest.raises(Refusal, match="verify-width"):
        InProcess(target, draft)


def test_draft_ahead_is_on_or_off(target, draft, monkeypatch):
    monkeypatch.setenv(DRAFT_AHEAD, "yes")
    with pytest.raises(Refusal, match="draft-ahead"):
        InProcess(target, draft)


def test_rates_count_the_width_used():
    class Args:
        speculative_algorithm, speculative_num_draft_tokens = "DFLASH", 4

    class Manager:
        server_args = Args

    meta = {"spec_correct_drafts_histogram": [2, 1, 0, 1, 9], "spec_num_correct_drafts": 4}
    meta_info(None, Manager, meta, None, 0)
    assert meta["spec_num_proposed_drafts"] == meta["spec_proposed_drafts"] == 9
    assert meta["spec_accept_rate"] == pytest.approx(4 / 9)
    assert meta["spec_accepted_per_position"] == [2, 1, 1]
    assert meta["spec_correct_drafts_histogram"] == [2, 1, 0, 1]
    assert meta["spec_accept_histogram"] == [2, 1, 0, 1]


def test_a_request_whose_drafts_were_never_verified_has_rate_0():
    class Manager:
        server_args = Namespace(speculative_algorithm="DFLASH", speculative_num_draft_tokens=4)

    meta = {"spec_correct_drafts_histogram": [2, 0, 0, 0, 0], "spec_num_correct_drafts": 0}
    meta_info(None, Manager, meta, None, 0)
    assert meta["spec_num_proposed_drafts"] == meta["spec_accept_rate"] == 0
    assert meta["spec_accepted_per_position"] == [0, 0, 0]


def test_survival_learns_what_a_probability_means():
    """Drafts that say 0.9 and are right half the time; positions behind the cut learn, too."""
    survival, rng = Survival(5), np.random.default_rng(0)
    said, widths = np.full((8, 4), 0.9), np.full(8, 2)
    assert survival(said)[0, 0] == pytest.approx(0.9)
    for _ in range(400):
        right = rng.random((8, 4)) < 0.5
        survival.observe(said, right.cumprod(axis=1).sum(axis=1).clip(max=1), widths)
    expected = [0.5, 0.25, 0.125, 0.0625]
    np.testing.assert_allclose(survival(said)[0], expected, atol=0.05, rtol=0.2)


@pytest.mark.parametrize("apart", [False, True])
def test_width_pays(apart):
    """Verify more where drafts survive and where positions cost nothing."""
    sure, doubtful = (np.full((4, 7), p).cumprod(axis=1) for p in (0.9, 0.3))
    flat, steep = np.ones(8), np.arange(1.0, 9.0)

    def best(survival, seconds):
        if apart:
            return best_widths(survival, seconds).tolist()
        return [best_width(survival, seconds)] * 4

    assert best(sure, flat) == best(doubtful, flat) == [8] * 4
    assert min(best(sure, 4 + steep)) > max(best(doubtful, 4 + steep))
    assert best(doubtful, steep**2) == [1] * 4


def test_times_between_measured_points():
    measured = {(1, 2): 1.0, (1, 4): 3.0, (5, 2): 5.0, (5, 4): 7.0}
    times = StepTimes(measured, (2, 3, 4))
    assert times.at(1).tolist() == [math.inf, 1.0, 2.0, 3.0]
    assert times.at(3).tolist() == times.at(5).tolist() == [math.inf, 5.0, 6.0, 7.0]


def test_only_widths_on_offer_are_chosen():
    times = StepTimes({(1, 4): 1.0, (1, 8): 1.2}, (4, 8)).at(1)
    assert np.isinf(times).tolist() == [True, True, True, False, True, True, True, False]
    sure, doubtful = (np.full((1, 7), p).cumprod(axis=1) for p in (0.9, 0.1))
    assert (best_width(sure, times), best_width(doubtful, times)) == (8, 4)


def test_requests_are_finished_soonest():
    """The least time of all steps of four requests on two places, by trying all widths.

    A place is never empty, so there are half as many steps as the requests' own together; a step
    takes the mean of what its requests would make it take if both were alike.
    """
    survival = np.array([[0.9, 0.8, 0.7], [0.4, 0.1, 0.02], [0.6, 0.5, 0.1], [1.0, 1.0, 1.0]])
    commits = 1 + np.pad(survival.cumsum(axis=1), ((0, 0), (1, 0)))
    tokens, totals = np.array([70, 120, 40, 200]), []
    for price in (0.05, 0.3, 1.0, 3.0):
        taken = 1 + price * np.arange(4.0)

        def takes(widths, taken=taken):
            drafts = np.array(widths) - 1
            return (tokens / commits[range(4), drafts] * taken[drafts]).sum() / 2

        chosen = best_widths(survival, taken).tolist()
        tried = itertools.product(range(1, 5), repeat=4)
        assert takes(chosen) == pytest.approx(min(map(takes, tried)))
        totals.append(sum(chosen))
    assert totals == sorted(totals, reverse=True)
    assert totals[0] > totals[-1] == 4


def test_a_request_is_cut_by_its_own_drafts():
    """Sure drafts beside it do not take its own away: it would hold its place the longer."""
    sure, code = np.full(3, 1.0), np.array([0.6, 0.3, 0.1])
    taken = np.array([1.0, 1.2, 1.4, 1.6])
    alone = best_widths(code[None], taken).tolist()
    assert alone == [3]
    assert best_widths(np.stack([code, *[sure] * 7]), taken).tolist() == alone + [4] * 7


def test_what_was_not_drafted_is_never_verified():
    """Even where a verify of more is measured to be faster, as noise can have it."""
    survival = np.array([[0.9, 0.8, 0.0], [0.0, 0.0, 0.0]])
    assert best_widths(survival, np.array([4.0, 3.0, 2.0, 1.0])).tolist() == [3, 1]


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
