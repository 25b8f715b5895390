"""Memory pressure, filters, aborts, the end of a row: no token is lost and no slot leaks."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.method.block import Block
from sglang_dflash.settings.options import DRAFT_AHEAD
from test.checkpoints import prompt
from test.forced import Forced
from test.inprocess import InProcess
from test.worker.conftest import Alone, Request, facts, force


@pytest.fixture(autouse=True, params=["off", "on"])
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """All tests of this file also run with --speculative-dflash-draft-ahead."""
    monkeypatch.setenv(DRAFT_AHEAD, request.param)
    return bool(request.param == "on")


def forced_requests(
    engine: InProcess, forced: Forced, asked: list[Request], expected: list[dict[str, Any]]
) -> list[Any]:
    reqs = []
    for (ids, options), answer in zip(asked, expected, strict=True):
        req = engine.add(ids, **options)
        forced.truth[req.rid] = answer["ids"]
        reqs.append(req)
    return reqs


@pytest.mark.parametrize("page", [1, 16])
def test_small_pool_retracts_and_finishes(target: str, draft: str, alone: Alone, page: int) -> None:
    """With too little KV for all, some are retracted, and all finish correctly."""
    asked = [(prompt(20 + i, 30), {"max_new_tokens": 60, "ignore_eos": True}) for i in range(6)]
    expected = alone(asked)
    rng = random.Random(1)
    flags = {"page_size": page, "max_total_tokens": 320, "disable_radix_cache": False}
    with InProcess(target, draft, schedule_conservativeness=0.01, **flags) as engine:
        forced = force(engine, lambda _: rng.randint(0, 7))
        free = engine.allocator.available_size()
        reqs = forced_requests(engine, forced, asked, expected)
        engine.run(*reqs)
        assert sum(req.retraction_count for req in reqs) > 0
        assert [facts(req) for req in reqs] == expected
        engine.scheduler.flush_cache()
        assert engine.allocator.available_size() == free


def test_a_pause_does_not_shut_waiting_requests_out(target: str, draft: str, alone: Alone) -> None:
    """The first request fills the pool, and ends with its prefill. Then the server is paused."""
    asked = [(prompt(30, 200), {"max_new_tokens": 1}), (prompt(31, 60), {"max_new_tokens": 20})]
    expected = alone(asked)
    with InProcess(target, draft, max_total_tokens=256) as engine:
        first, second = (engine.add(ids, **options) for ids, options in asked)
        engine.step()
        assert first.finished()
        assert engine.scheduler.waiting_queue == [second]
        assert engine.scheduler.running_batch.batch_is_full
        engine.scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        engine.scheduler.continue_generation(ContinueGenerationReqInput())
        engine.run(second, limit=100)
        assert [facts(first), facts(second)] == expected


def test_a_health_check_right_after_an_answer(target: str, draft: str) -> None:
    """A busy server answers it after its next step. There is none."""
    check = TokenizedGenerateReqInput(
        rid=f"{HEALTH_CHECK_RID_PREFIX}_1",
        input_text="",
        input_ids=array("q", [0]),
        mm_inputs=None,
        sampling_params=SamplingParams(max_new_tokens=1),
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
    )
    with InProcess(target, draft) as engine:
        req = engine.add(prompt(32, 20), max_new_tokens=20)
        while not req.finished():
            engine.step()
        engine.scheduler.process_input_requests([check])
        assert engine.scheduler.return_health_check_ipcs
        assert not engine.step()
        assert not engine.scheduler.return_health_check_ipcs


def test_a_block_is_drafted_before_the_host_commits(
    target: str, draft: str, alone: Alone, ahead: bool
) -> None:
    """Each step drafts the next block. A prefill drafts for the requests that it adds."""
    asked = [(prompt(25 + i, 20), {"max_new_tokens": 40, "ignore_eos": True}) for i in range(3)]
    expected = alone(asked)
    with InProcess(target, draft) as engine:
        forced: Any = force(engine, lambda _: 2)
        proposed, propose = [], forced.propose

        def recorded(batch: Any, *where: Any) -> Block:
            block: Block = propose(batch, *where)
            starts = block.positions[:, 0].tolist()
            for req, start in zip(batch.reqs, starts, strict=True):
                behind = start + 1 - len(req.origin_input_ids) - len(req.output_ids)
                proposed.append((req.rid, len(req.output_ids), behind))
            return block

        forced.propose = recorded
        reqs = []
        for (ids, options), answer in zip(asked, expected, strict=True):
            reqs.append(engine.add(ids, **options))
            forced.truth[reqs[-1].rid] = answer["ids"]
            engine.step()
            engine.step()
        engine.run(*reqs)
        assert [facts(req) for req in reqs] == expected
    for req in reqs:
        mine = [entry[1:] for entry in proposed if entry[0] == req.rid]
        if ahead:  # the host has not seen the 1 token of a prefill, or the 3 of a step
            assert mine == [(0, 1), *((1 + 3 * i, 3) for i in range(13))]
        else:
            assert mine == [(1 + 3 * i, 0) for i in range(13)]


def test_filter_and_retract_in_one_step(target: str, draft: str, alone: Alone) -> None:
    """Requests 0 and 2 of 4 finish while one is retracted. The others keep their state."""
    lengths = [9, 60, 9, 60]
    asked = [
        (prompt(30 + i, 20), {"max_new_tokens": n, "ignore_eos": True})
        for i, n in enumerate(lengths)
    ]
    expected = alone(asked)
    with InProcess(target, draft) as engine:
        forced = force(engine, lambda _: 7)
        reqs = forced_requests(engine, forced, asked, expected)
        while not reqs[0].finished():
            engine.step()
        assert [req.finished() for req in reqs] == [True, False, True, False]
        batch = engine.scheduler.running_batch
        batch.filter_batch(v1_spec_info_filtered=True)
        keep = batch.reqs.index(reqs[1])
        batch.release_req(batch.reqs.index(reqs[3]), 1, engine.server_args)
        batch.filter_batch(keep_indices=[keep])
        assert batch.spec_info.anchors.tolist() == [reqs[1].output_ids[-1]]
        engine.scheduler._add_request_to_queue(reqs[3], is_retracted=True)
        engine.run(*reqs)
        assert [facts(req) for req in reqs] == expected


@pytest.mark.parametrize("page", [1, 16, 256])
def test_runs_to_the_context_length(target: str, draft: str, alone: Alone, page: int) -> None:
    """The last block crosses the end of the context, and does not write the next row."""
    ids = prompt(40, 12)
    options = {"max_new_tokens": 512 - 12 - 1, "ignore_eos": True}
    [expected] = alone([(ids, options)])
    assert len(expected["ids"]) > 480
    with InProcess(target, draft, page_size=page) as engine:
        forced = force(engine, lambda _: 6)
        req = engine.add(ids, **options)
        forced.truth[req.rid] = expected["ids"]
        engine.step()
        canary = engine.rows.req_to_token[req.req_pool_idx + 1]
        canary.fill_(-7)
        engine.run(req)
        assert (canary == -7).all()
        assert facts(req) == expected


@pytest.mark.parametrize("page", [1, 16])
def test_abort_in_mid_block_and_reuse(target: str, draft: str, alone: Alone, page: int) -> None:
    """After a finish and after an abort, slots and row serve the next request as if new."""
    asked = [(prompt(50 + i, 25), {"max_new_tokens": 40, "ignore_eos": True}) for i in range(3)]
    expected = alone(asked)
    with InProcess(target, draft, page_size=page, max_running_requests=1) as engine:
        forced = force(engine, lambda _: 3)
        free = engine.allocator.available_size()
        first, second, third = forced_requests(engine, forced, asked, expected)
        while len(first.output_ids) < 10:
            engine.step()
        engine.abort(first)
        engine.run(first, second, third)
        assert first.finished_reason.to_json()["type"] == "abort"
        assert [facts(second), facts(third)] == expected[1:]
        engine.scheduler.flush_cache()
        assert engine.allocator.available_size() == free


def test_longest_request_fits_the_pool(target: str, draft: str, alone: Alone) -> None:
    """Capacity counts the draft pool, and the server can finish each admitted request."""
    with InProcess(target, draft, max_total_tokens=128) as engine:
        draft_pool = engine.worker.draft_model_runner.token_to_kv_pool
        assert draft_pool.k_buffer[0].shape[0] == engine.allocator.size + 1
        ids = prompt(60, 40)
        req = engine.add(ids, max_new_tokens=500, ignore_eos=True)
        engine.run(req)
    assert req.finished_reason.to_json()["type"] == "length"
    assert len(req.output_ids) > 128 - 40 - 20
    [expected] = alone([(ids, {"max_new_tokens": len(req.output_ids), "ignore_eos": True})])
    assert list(req.output_ids) == expected["ids"]


def test_requests_that_do_not_speculate(target: str, draft: str, alone: Alone) -> None:
    """Requests for one token and for none run beside requests that decode."""
    asked = [
        (prompt(70, 20), {"max_new_tokens": 50, "ignore_eos": True}),
        (prompt(71, 20), {"max_new_tokens": 1, "ignore_eos": True}),
        (prompt(72, 1), {"max_new_tokens": 2, "ignore_eos": True}),
        (prompt(73, 9), {"max_new_tokens": 0}),
    ]
    expected = alone(asked)
    with InProcess(target, draft) as engine:
        forced = force(engine, lambda _: 2)
        reqs = forced_requests(engine, forced, asked, expected)
        engine.run(*reqs)
        assert [facts(req) for req in reqs] == expected
        assert [req.spec_verify_ct for req in reqs][1:] == [0, 1, 0]


def test_input_embeds(target: str, draft: str) -> None:
    """A prompt that consists of embeddings. SGLang serves it without a radix cache."""
    table = load_file(f"{target}/model.safetensors")["model.embed_tokens.weight"].bfloat16().float()
    ids = prompt(74, 20)
    options = {"max_new_tokens": 40, "ignore_eos": True, "input_embeds": table[ids].tolist()}
    answers = []
    for path in (None, draft):
        with InProcess(target, path, disable_radix_cache=True) as engine:
            _embeddings_in_fp32(engine, table)
            plain = engine.generate(ids, max_new_tokens=40, ignore_eos=True)
            answers.append((plain, engine.generate([5] * len(ids), **options)))
    assert answers[0] == answers[1]
    assert answers[0][0] == answers[0][1]


def _embeddings_in_fp32(engine: InProcess, table: torch.Tensor) -> None:
    """SGLang casts embeddings to bf16. This casts them back, and the target has values of bf16."""

    def cast(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            arg.float() if isinstance(arg, torch.Tensor) and arg.dtype == torch.bfloat16 else arg
            for arg in args
        )

    layers = engine.scheduler.tp_worker.model_runner.model.model
    layers.embed_tokens.weight.data[: len(table)] = table
    layers.register_forward_pre_hook(cast)


def test_replaced_embeddings(target: str, draft: str) -> None:
    """Some tokens of a prompt are given as embeddings, which SGLang leaves in the batch."""
    table = load_file(f"{target}/model.safetensors")["model.embed_tokens.weight"].float()
    ids = prompt(75, 20)
    given = PositionalEmbeds(embeds=table[[9, 11]], positions=[0, 2])
    options = {"max_new_tokens": 40, "ignore_eos": True, "positional_embed_overrides": given}
    answers = []
    for path in (None, draft):
        with InProcess(target, path, disable_radix_cache=True) as engine:
            plain = engine.generate(ids, max_new_tokens=40, ignore_eos=True)
            answers.append((plain, engine.generate(ids, **options)))
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]


def test_counters_of_a_forced_pattern(target: str, draft: str, alone: Alone) -> None:
    """Steps, accepted drafts and the histogram are those of a known pattern."""
    pattern = [3, 0, 7, 1, 1]
    total = 1 + sum(k + 1 for k in pattern)
    [expected] = alone([(prompt(80, 10), {"max_new_tokens": total, "ignore_eos": True})])
    with InProcess(target, draft) as engine:
        counts = iter([*pattern, 0])  # a block drafted ahead may never be verified
        forced = force(engine, lambda _: next(counts))
        [req] = forced_requests(
            engine,
            forced,
            [(prompt(80, 10), {"max_new_tokens": total, "ignore_eos": True})],
            [expected],
        )
        engine.run(req)
        assert list(req.output_ids) == expected["ids"]
        assert req.spec_verify_ct == 5
        assert req.spec_num_correct_drafts == 12
        assert req.spec_correct_drafts_histogram == [1, 2, 0, 1, 0, 0, 0, 1]


def test_finish_on_an_accepted_draft_counts_it(target: str, draft: str, alone: Alone) -> None:
    """If a request ends on an accepted draft, all drafts that it took are counted."""
    [expected] = alone([(prompt(81, 10), {"max_new_tokens": 6, "ignore_eos": True})])
    with InProcess(target, draft) as engine:
        forced = force(engine, lambda _: 7)
        options = {"max_new_tokens": 6, "ignore_eos": True}
        [req] = forced_requests(engine, forced, [(prompt(81, 10), options)], [expected])
        engine.run(req)
        assert (req.spec_verify_ct, req.spec_num_correct_drafts) == (1, 5)
        assert req.spec_correct_drafts_histogram == [0, 0, 0, 0, 0, 1]


def test_scheduler_tensors_are_not_changed_in_place(target: str, draft: str) -> None:
    """Tensors that the scheduler holds keep their values. The worker makes new ones."""
    with InProcess(target, draft) as engine:
        req = engine.add(prompt(90, 10), max_new_tokens=20, ignore_eos=True)
        engine.step()
        engine.step()
        batch = engine.scheduler.running_batch
        held = {
            name: getattr(batch, name) for name in ("seq_lens", "seq_lens_cpu", "orig_seq_lens")
        }
        copies = {name: tensor.clone() for name, tensor in held.items()}
        mode, info = batch.forward_mode, batch.sampling_info
        engine.step()
        assert all((held[name] == copies[name]).all() for name in held)
        assert batch.forward_mode == mode
        assert batch.sampling_info is info
        engine.run(req)
