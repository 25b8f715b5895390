"""--speculative-dflash-verify-width: with any verified part of a block, the output is the same."""

from __future__ import annotations

import inspect
import pickle
import random
import re
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_dflash.adaptive import step_times
from sglang_dflash.adaptive.throughput import StepTimes
from sglang_dflash.adaptive.verify_graphs import NoGraphs, WidthGraphs
from sglang_dflash.adaptive.verify_width import AdaptiveWidth, FixedChoice, Shapes
from sglang_dflash.errors import Refusal
from sglang_dflash.kernels import Kernels
from sglang_dflash.method.acceptance import Outcome
from sglang_dflash.method.block import Block
from sglang_dflash.model.lm_head import Prediction
from sglang_dflash.report.hooks import meta_info
from sglang_dflash.report.metrics import AcceptanceHistogram
from sglang_dflash.settings.options import DRAFT_AHEAD, Options
from sglang_dflash.settings.options import VERIFY_WIDTH as VARIABLE
from test.checkpoints import prompt
from test.cuts import cut, verify_parts
from test.inprocess import InProcess
from test.precision import HIDDEN_STATE_BOUND
from test.traces import draft_kv
from test.worker.conftest import Alone, Cut, facts, force


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("width", ["2", "5", "auto", "any"])
def test_equals_target(
    target: str,
    draft: str,
    alone: Alone,
    monkeypatch: pytest.MonkeyPatch,
    width: str,
    page: int,
    cut_apart: Cut,
) -> None:
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
                assert histogram.num_verified == req.spec_verify_ct * (int(width) - 1)
                assert sum(histogram) == req.spec_verify_ct


def test_context_kv_of_requests_cut_apart(
    target: str, draft: str, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After steps of unequal widths, the draft's KV equals that of a prefill of the same tokens."""
    monkeypatch.setenv(VARIABLE, "auto")
    rng = random.Random(6)
    asked = [(prompt(320 + i, 9 + i), {"max_new_tokens": 60, "ignore_eos": True}) for i in range(4)]
    expected = alone(asked)
    seen = []
    with InProcess(target, draft) as engine:
        forced = force(engine, lambda _: rng.randint(0, 7))
        reqs = [engine.add(ids, **options) for ids, options in asked]
        forced.truth = {req.rid: e["ids"] for req, e in zip(reqs, expected, strict=True)}

        def unequal(block: Block) -> Block:
            return cut(block, [8, *(rng.randint(1, 7) for _ in block.slots[1:])])

        verify_parts(engine.worker, unequal)
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
            torch.testing.assert_close(kv, fresh, atol=HIDDEN_STATE_BOUND, rtol=0)
            engine.run(req)


def test_a_probability_that_is_no_number_counts_as_0(
    target: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "auto")
    with InProcess(target, draft) as engine:
        model = engine.worker.draft_model_runner.model
        blocks: list[Block] = []
        predict = model.head.predict

        def garbled(*given: Any) -> Prediction:
            predicted: Prediction = predict(*given)
            lost = torch.full(predicted.ids.shape, float("nan"))
            return predicted._replace(probabilities=lost)

        model.head.predict = garbled
        policy = engine.worker.verify_width
        choose = policy.choose

        def noted(block: Block, reqs: Any) -> Any:
            blocks.append(block)
            return choose(block, reqs)

        policy.choose = noted
        output = engine.generate(prompt(330, 12), max_new_tokens=12, ignore_eos=True)
    assert len(output) == 12
    assert blocks
    for block in blocks:
        assert block.probabilities is not None
        assert not block.probabilities.any()


GREEDY: Any = SimpleNamespace(sampling_params=SimpleNamespace(top_k=1))


def block_of(*probabilities: list[float]) -> Block:
    """A block whose requests have drafts of these probabilities."""
    given = torch.tensor(probabilities)
    zeros = torch.zeros(len(given), given.shape[1] + 1, dtype=torch.int64)
    return Block(zeros, zeros, zeros, given)


def policy_of(times: dict[tuple[int, int], float], shapes: Shapes) -> AdaptiveWidth:
    step_times = StepTimes({requests: 0.0 for requests, _ in times}, times)
    return AdaptiveWidth(8, step_times, shapes, Kernels.on("cpu"), "cpu", queues_work=False)


def test_one_width_for_all_where_a_probability_is_no_number() -> None:
    """If requests have equal widths, as on CUDA, an allowed width is still chosen."""
    shapes = NoGraphs((2, 4, 8), ragged=False)
    policy = policy_of({(1, width): 2.0 + width for width in (2, 4, 8)}, shapes)
    block = block_of([*[0.9] * 3, 0.0, *[0.9] * 3])
    chosen = [policy.choose(block, [GREEDY]).block.width for _ in range(2)]
    assert chosen == [8, 4]  # the first step is a probe of whole blocks


def test_blocks_are_whole_where_nothing_can_be_gained() -> None:
    """The device then chooses nothing."""
    times = {(1, 4): 1.0, (1, 8): 1.04, (4, 16): 1.0, (4, 32): 1.2}
    policy, block = policy_of(times, NoGraphs((4, 8), ragged=True)), block_of([0.9] * 7)
    assert policy.choose(block, [GREEDY]) == FixedChoice(block)
    many = block_of(*[[0.9] * 7] * 4)
    assert not isinstance(policy.choose(many, [GREEDY] * 4), FixedChoice)


def test_the_likeliest_rows_of_a_batch() -> None:
    """Sure drafts get the rows of doubtful ones; each request keeps its anchor."""
    options = {(3, 3 * width): 4.0 + width for width in range(1, 9)}
    policy = policy_of(options, NoGraphs(range(1, 9), ragged=True))
    block = block_of([0.99] * 7, [0.9, 0.2, *[0.9] * 5], [0.01] * 7)
    first, second = (policy.choose(block, [GREEDY] * 3).block for _ in range(2))
    assert first is block  # a probe
    assert second.rows == 12
    assert second.lens is not None
    assert second.lens.tolist() == [8, 3, 1]


@pytest.mark.parametrize("sampled", [False, True])
def test_greedy_and_sampled_drafts_are_counted_apart(sampled: bool) -> None:
    """What became of greedy drafts says nothing of sampled ones."""
    policy = policy_of({(1, w): 4.0 + w for w in range(1, 9)}, NoGraphs(range(1, 9), ragged=True))
    params = SimpleNamespace(top_k=20 if sampled else 1)
    later: Any = SimpleNamespace(sampling_params=params)
    block = block_of([0.9] * 7)
    for _ in range(60):
        widths = torch.tensor([8])
        outcome = Outcome(torch.zeros(1, 8, dtype=torch.int64), torch.tensor([0]), widths)
        policy.choose(block, [GREEDY]).learn(outcome)
    rows = policy.choose(block, [later]).block.rows
    assert rows == (8 if sampled else 1)


@pytest.mark.parametrize(
    ("asked", "on_cpu", "on_cuda"),
    [
        (None, tuple(range(1, 9)), (8,)),
        ("auto", tuple(range(1, 9)), (2, 4, 6, 8)),
        ("full", (8,), (8,)),
        ("3", (3,), (3,)),
    ],
)
def test_widths_on_offer(
    monkeypatch: pytest.MonkeyPatch,
    asked: str | None,
    on_cpu: tuple[int, ...],
    on_cuda: tuple[int, ...],
) -> None:
    """On CUDA each width needs graphs, so there are fewer widths, and only with auto."""
    monkeypatch.delenv(VARIABLE)
    if asked is not None:
        monkeypatch.setenv(VARIABLE, asked)
    for device, expected in (("cpu", on_cpu), ("cuda", on_cuda)):
        args = Namespace(device=device, speculative_num_draft_tokens=8, enable_dp_attention=False)
        assert Options.read(args).verify_widths == expected


def test_every_width_has_its_own_attention_backend(
    target: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made while the server arguments have that width, and used for verifies of the width."""
    with InProcess(target, draft) as engine:
        runner, made = engine.worker.model_runner, {8: engine.worker.model_runner.attn_backend}
        make = ModelRunner._get_attention_backend

        def noted(runner: Any, *args: Any, **kwargs: Any) -> Any:
            width = runner.server_args.speculative_num_draft_tokens
            made[width] = make(runner, *args, **kwargs)
            return made[width]

        monkeypatch.setattr(ModelRunner, "_get_attention_backend", noted)
        graphs = WidthGraphs(runner, (2, 4, 8))
        assert runner.server_args.speculative_num_draft_tokens == 8
        assert sorted(made) == [2, 4, 8]
        block = block_of([0.9] * 7)
        for width, backend in made.items():
            graphs.use(block.first(width))
            assert runner.attn_backend is backend
        graphs.use_whole()
        assert runner.attn_backend is made[8]


def test_graphs_of_a_width_are_made_as_sglang_makes_them() -> None:
    """The arguments fit SGLang's graph runner, which only a GPU can construct."""
    inspect.signature(CudaGraphRunner).bind(None, attn_backend=None)


@pytest.mark.parametrize("width", ["1", "9", "half", ""])
def test_refused(target: str, draft: str, monkeypatch: pytest.MonkeyPatch, width: str) -> None:
    monkeypatch.setenv(VARIABLE, width)
    with pytest.raises(Refusal, match="verify-width"):
        InProcess(target, draft)


def test_draft_ahead_is_on_or_off(target: str, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DRAFT_AHEAD, "yes")
    with pytest.raises(Refusal, match="draft-ahead"):
        InProcess(target, draft)


def meta_of(counts: list[int], num_verified: int) -> dict[str, Any]:
    """The meta_info of a request with these steps, as a server sends it."""
    histogram = AcceptanceHistogram(counts)
    histogram.num_verified = num_verified
    received = pickle.loads(pickle.dumps(histogram))  # it comes from another process
    correct = sum(number * steps for number, steps in enumerate(counts))
    meta = {"spec_correct_drafts_histogram": received, "spec_num_correct_drafts": correct}
    server_args = Namespace(speculative_algorithm="DFLASH", speculative_num_draft_tokens=4)
    meta_info(None, Namespace(server_args=server_args), meta, None, 0)
    return meta


def test_rates_count_the_width_used() -> None:
    meta = meta_of([2, 1, 0, 1], num_verified=9)
    assert meta["spec_num_proposed_drafts"] == meta["spec_proposed_drafts"] == 9
    assert meta["spec_accept_rate"] == pytest.approx(4 / 9)
    assert meta["spec_accepted_per_position"] == [2, 1, 1]
    assert type(meta["spec_correct_drafts_histogram"]) is list
    assert meta["spec_correct_drafts_histogram"] == meta["spec_accept_histogram"] == [2, 1, 0, 1]


def test_a_request_whose_drafts_were_never_verified_has_rate_0() -> None:
    meta = meta_of([2], num_verified=0)
    assert meta["spec_num_proposed_drafts"] == meta["spec_accept_rate"] == 0
    assert meta["spec_accepted_per_position"] == [0, 0, 0]


def test_measuring_ends_in_time(
    target: str, draft: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Small batches are measured first. Larger ones take the times of the largest measured."""
    monkeypatch.setenv(VARIABLE, "auto")
    monkeypatch.setattr(step_times, "MOST_SECONDS", 0)
    with InProcess(target, draft, max_running_requests=8, log_level="info") as engine:
        times = engine.worker.verify_width._step_times
        assert times.at(8, [1, 8]).tolist() == times.at(1, [1, 8]).tolist()
    log = capfd.readouterr().err
    number = r"\d+\.\d"
    shown = rf" 1 requests: draft {number}, verify 1: {number} 2: {number} 4: {number} 8: {number}$"
    assert re.search(shown, log, re.MULTILINE)
    assert " 2 requests: draft" not in log
