"""Drafts of sampled requests know the noise of the target's draws, and only the drafts change."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.layers.sampler import multinomial_with_seed
from transformers import AutoTokenizer, Qwen3ForCausalLM

from sglang_dflash.method.noise import BEGIN, SHARES, gumbel
from sglang_dflash.settings.options import DRAFT_AHEAD
from sglang_dflash.tiny import DRAFT, TARGET
from sglang_dflash.tiny.prompts import held_out
from test.checkpoints import prompt
from test.formats import CASES, by_own_names, write
from test.inprocess import InProcess
from test.reference import draft_block
from test.traces import record
from test.worker.conftest import force

SAMPLED: dict[str, Any] = {"temperature": 0.9, "max_new_tokens": 40, "ignore_eos": True}
SEED, VOCAB = 2**63 - 3, 200
HEADS = [
    "zlab",
    "zlab sample_from_anchor",
    "speculators draft vocabulary",
    "SpecForge DSpark",
    "Domino shifted, pure 1",
    "DFlash 2 cap, multiplier",
    "DSpine",
    "LiLiCorr",
]
FURTHER = [
    "zlab scale, cap, multiplier",
    "DeepSpec rnn",
    "Domino",
    "DFlash 2",
    "speculators DFlash 2 from the anchor",
    "DSpine sliding, cap, padded vocabulary",
]


def noise_of(engine: InProcess) -> Any:
    return engine.worker.verifier._noise


def fix_share(engine: InProcess, share: int) -> None:
    """Draft at this share of the noise from now on, whatever is best."""
    noise = noise_of(engine)
    noise.table.scores.zero_()[:, share] = 1
    noise._kernels = noise._kernels._replace(judge_shares=lambda *_: None)


def test_seeded_draws_of_sglang_have_this_noise() -> None:
    torch.manual_seed(1)
    logprobs = torch.randn(500, 700).log_softmax(dim=-1)
    seeds, positions = torch.randint(2**62, (500,)), torch.randint(2**17, (500,))
    drawn = multinomial_with_seed(logprobs, seeds, positions)[:, 0]
    noise = gumbel(seeds[:, None], positions[:, None], torch.arange(700))
    assert torch.equal((logprobs + noise).argmax(dim=1), drawn)


@pytest.mark.parametrize(
    "case", [*HEADS, *(pytest.param(case, marks=pytest.mark.full) for case in FURTHER)]
)
def test_drafts_are_drawn_with_the_targets_noise(
    target: str, model: Qwen3ForCausalLM, tmp_path: Path, case: str
) -> None:
    """Each draft is the largest sum of its logit and the noise of the target's draw, as shared.

    A greedy request in the same batch has the argmax.
    """
    config, weights, semantics = CASES[case]()
    own = by_own_names(weights)
    prompts, seen = [prompt(61, 21), prompt(62, 14)], {1: 0, 2: 0, 3: 0}
    with InProcess(target, str(write(tmp_path, config, weights))) as engine:
        recorder = record(engine)
        for share in seen:
            fix_share(engine, share)
            options = [SAMPLED | {"sampling_seed": SEED}, SAMPLED | {"temperature": 0}]
            reqs = [engine.add(ids, **each) for ids, each in zip(prompts, options, strict=True)]
            while not reqs[0].finished():
                before = [list(req.output_ids) for req in reqs]
                blocks = [len(recorder.blocks.get(req.rid, [])) for req in reqs]
                engine.step()
                for i, req in enumerate(reqs):
                    if len(recorder.blocks.get(req.rid, [])) == blocks[i]:
                        continue
                    ids = prompts[i] + before[i]
                    positions = torch.arange(len(ids) - 1, len(ids) + 8)[:, None]
                    noise = gumbel(torch.tensor([SEED]), positions, torch.arange(VOCAB))
                    noise *= 0.9 * SHARES[share] if i == 0 else 0.0
                    drafts = draft_block(model, semantics, own, ids, noise=noise)
                    drafts = drafts[: len(recorder.blocks[req.rid][-1]) - 1]
                    assert recorder.blocks[req.rid][-1] == [ids[-1], *drafts]
                    seen[share] += i == 0
            engine.run(*reqs)
    assert min(seen.values()) > 10


def test_noise_stays_with_its_position(
    target: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A seed has one answer: beside others, retracted, and however many drafts are accepted."""
    options = SAMPLED | {"sampling_seed": 12}
    with InProcess(target, draft) as engine:
        answer = engine.generate(prompt(71, 10), **options)
        assert engine.generate(prompt(71, 10), **options) == answer
    with InProcess(target, draft, max_total_tokens=256, disable_radix_cache=True) as engine:
        reqs = [engine.add(prompt(71, 10), **options) for _ in range(8)]
        engine.run(*reqs)
        assert [list(req.output_ids) for req in reqs] == [answer] * 8
        assert sum(req.retraction_count for req in reqs) > 0
    for ahead in ("on", "off"):
        monkeypatch.setenv(DRAFT_AHEAD, ahead)
        with InProcess(target, draft) as engine:
            counts = iter([0, 3, 7, 1, 0, 0, 5, 7, 7, 2] * 9)
            forced = force(engine, partial(next, counts))
            req = engine.add(prompt(71, 10), **options)
            forced.truth[req.rid] = answer
            engine.run(req)
            assert list(req.output_ids) == answer


def test_requests_without_a_seed_differ(target: str, draft: str) -> None:
    """And so do two servers' answers, unless `--random-seed` is the same."""
    answers = []
    for seed in (5, 5, 6):
        with InProcess(target, draft, random_seed=seed) as engine:
            answers.append([tuple(engine.generate(prompt(81, 9), **SAMPLED)) for _ in range(2)])
    assert answers[0] == answers[1]
    assert len({*answers[0], *answers[2]}) == 4


@pytest.mark.parametrize("filtered", [False, True])
def test_shared_noise_raises_the_accept_length(filtered: bool) -> None:
    """Code of the bundled pair at temperature 1: the same answers, in fewer steps."""
    options: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 80}
    options |= {"top_p": 0.95, "top_k": 20} if filtered else {}
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    steps, answers = {}, {}
    for share in (0, None):
        with InProcess(str(TARGET), str(DRAFT)) as engine:
            if share is not None:
                fix_share(engine, share)
            reqs = [
                engine.add(tokenizer.encode(example.prompt), sampling_seed=i, **options)
                for i, example in enumerate(held_out("code", 8))
            ]
            engine.run(*reqs)
            steps[share] = sum(req.spec_verify_ct for req in reqs)
            answers[share] = [list(req.output_ids) for req in reqs]
            assert share is not None or noise_of(engine).table.scores[-1].argmax() > BEGIN
    assert answers[0] == answers[None]
    assert steps[None] < (0.99 if filtered else 0.96) * steps[0]


def test_seeds_that_bind(target: str, draft: str) -> None:
    """Drafts share the noise of SGLang's draw, but for requests with a filter."""
    flags: dict[str, Any] = {"enable_deterministic_inference": True, "sampling_backend": "pytorch"}
    with InProcess(target, draft, **flags) as engine:
        table = noise_of(engine).table
        plain = engine.add(prompt(95, 9), **SAMPLED)
        others = [engine.add(prompt(95, 9), top_k=5, **SAMPLED)]
        others.append(engine.add(prompt(95, 9), sampling_seed=7, top_p=0.9, **SAMPLED))
        others.append(engine.add(prompt(95, 9), **SAMPLED | {"temperature": 0}))
        engine.step()
        assert table.temperatures[plain.req_pool_idx] == pytest.approx(0.9)
        assert [table.temperatures[req.req_pool_idx] for req in others] == [0, 0, 0]
        assert table.seeds[plain.req_pool_idx] == 42
        engine.run(plain, *others)
