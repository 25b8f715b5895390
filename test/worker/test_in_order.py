"""Families that draft in order: blocks are whole, and of any width."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from sglang_dflash.kernels.biased_argmax import biased_largest_in_torch
from sglang_dflash.model import head
from test.checkpoints import BLOCK, prompt
from test.formats import CASES, by_own_names, write
from test.inprocess import InProcess
from test.reference import draft_block
from test.traces import record, trace

FAMILIES = [
    *("DeepSpec rnn", "SpecForge DSpark rnn fill-in", "DFlash 2", "Domino shifted", "DSpine"),
    "LiLiCorr",
]


@pytest.mark.parametrize("case", [*FAMILIES, "speculators DFlash 2 from the anchor"])
def test_requests_of_a_batch_do_not_mix(
    target: str,
    model: Qwen3ForCausalLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
) -> None:
    """Three requests, of which two are drafted in one chunk."""
    monkeypatch.setattr(head, "TOKEN_CHUNK", 2 * BLOCK)
    config, weights, semantics = CASES[case]()
    prompts = [prompt(seed, length) for seed, length in ((51, 20), (52, 33), (53, 9))]
    own, compared = by_own_names(weights), 0
    with InProcess(target, str(write(tmp_path, config, weights))) as engine:
        recorder = record(engine)
        reqs = [engine.add(ids, max_new_tokens=24, ignore_eos=True) for ids in prompts]
        while not all(req.finished() for req in reqs):
            before = [list(req.output_ids) for req in reqs]
            seen = [len(recorder.blocks.get(req.rid, [])) for req in reqs]
            engine.step()
            for ids, req, output, count in zip(prompts, reqs, before, seen, strict=True):
                if len(recorder.blocks.get(req.rid, [])) > count:
                    drafts = recorder.blocks[req.rid][-1][1:]
                    assert drafts == draft_block(model, semantics, own, ids + output)
                    compared += 1
    assert compared > 30


@pytest.mark.parametrize(
    ("case", "width"),
    [
        ("DFlash 2", 2),
        ("DFlash 2", 4),
        ("SpecForge DSpark rnn fill-in", 3),
        ("DeepSpec rnn", 3),
        ("Domino", 3),
        ("DSpine", 2),
        ("DSpine of Tencent", 5),
        ("LiLiCorr", 2),
        ("LiLiCorr of the draft's width", 5),
    ],
)
def test_shorter_blocks(
    target: str, model: Qwen3ForCausalLM, tmp_path: Path, case: str, width: int
) -> None:
    """The server may be told to draft less than the draft was trained for. A block has 3 taps."""
    config, weights, semantics = CASES[case]()
    path, ids = str(write(tmp_path, config, weights)), prompt(54, 25)
    own = by_own_names(weights)
    with InProcess(target, path, speculative_num_draft_tokens=width) as engine:
        steps = trace(engine, ids, 30)
    assert len(steps) > 10
    for output, block in steps:
        assert len(block) == width
        read = width - semantics.sample_from_anchor
        assert block[1:] == draft_block(model, semantics, own, ids + output, read)


def test_logits_of_another_dtype() -> None:
    """`--enable-fp32-lm-head`: logits are float32, and the heads are bfloat16."""
    torch.manual_seed(2)
    logits, latent, weight = torch.randn(3, 50), torch.randn(3, 8), torch.randn(50, 8)
    exact = logits + latent.bfloat16().float() @ weight.bfloat16().float().T
    for return_probs in (False, True):
        found = biased_largest_in_torch(logits, latent.bfloat16(), weight.bfloat16(), return_probs)
        assert torch.equal(found.argmax, exact.argmax(dim=1, keepdim=True))
        torch.testing.assert_close(found.value, exact.amax(dim=1, keepdim=True), atol=0.05, rtol=0)
