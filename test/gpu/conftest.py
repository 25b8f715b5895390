"""Shared by the tests of this folder: the bundled pair in a real scheduler on the GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Triton multiplies fp32 as TF32 by default, and this rounds differently in each kernel.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")

import pytest
import torch
from sglang.srt.layers.utils.multi_platform import MultiPlatformOp
from transformers import AutoTokenizer

from sglang_dflash.tiny import DRAFT, TARGET
from sglang_dflash.tiny.prompts import held_out
from test.inprocess import InProcess
from test.precision import NEAR_TIE
from test.servers import chat

# A dry run on a CPU shows that a test itself works: in fp32, with the one backend of a CPU.
DRY_RUN = "DFLASH_DRY_RUN" in os.environ and not torch.cuda.is_available()
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() or DRY_RUN), reason="needs a CUDA GPU"),
]
TOKENIZER = AutoTokenizer.from_pretrained(TARGET)
N = {"max_new_tokens": 96, "ignore_eos": True}


def prompts(count: int) -> list[list[int]]:
    """Held-out word problems as chat prompts."""
    examples = held_out("word", count, seed=4)
    return [TOKENIZER.encode(chat(example.prompt)) for example in examples]


def engine(
    draft: bool = True, pair: tuple[Path, Path] = (TARGET, DRAFT), **flags: Any
) -> InProcess:
    """A scheduler of a target, with its draft or without."""
    usual: dict[str, Any] = {
        "dtype": "bfloat16",
        "mem_fraction_static": 0.3,
        "max_running_requests": 8,
        "disable_piecewise_cuda_graph": True,  # half a minute to capture
    }
    flags = usual | flags
    if DRY_RUN:
        flags |= {"attention_backend": None, "dtype": "float32"}
        if "lora_backend" in flags:
            flags["lora_backend"] = "torch_native"
    return InProcess(str(pair[0]), str(pair[1]) if draft else None, **flags)


@pytest.fixture(scope="module")
def native() -> Iterator[None]:
    """SGLang's torch forms of norm, RoPE and activation. Its CUDA kernels do not support fp32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MultiPlatformOp, "dispatch_forward", lambda op: op.forward_native)
        yield


def accept_length(reqs: list[Any]) -> float:
    """Tokens per step of finished requests."""
    steps: int = sum(req.spec_verify_ct for req in reqs)
    drafts: int = sum(req.spec_num_correct_drafts for req in reqs)
    return 1 + drafts / steps


class Margins:
    """For each committed token of an engine, the difference between the best and second logit."""

    def __init__(self, run: InProcess) -> None:
        self._verify = run.worker.verifier.verify
        self.of: dict[tuple[str, int], float] = {}  # by request and place
        run.worker.verifier.verify = self._watched

    def _watched(self, batch: Any, block: Any) -> Any:
        before = [(req, len(req.output_ids)) for req in batch.reqs]
        verified = self._verify(batch, block)
        logits, cut = verified.output.next_token_logits, verified.block
        assert torch.equal(cut.flatten(verified.accepted.outcome.sampled), logits.argmax(-1))
        two = logits.topk(2).values
        rows = cut.unflatten(two[:, 0] - two[:, 1]).tolist()
        for (req, length), row in zip(before, rows, strict=True):
            for j, margin in enumerate(row):
                self.of[req.rid, length + j] = margin
        return verified


def parted(reqs: list[Any], margins: Margins, expected: list[list[int]]) -> list[float]:
    """The margin at the first difference of each answer that differs from the expected one."""
    found = []
    for req, truth in zip(reqs, expected, strict=True):
        pairs = zip(req.output_ids, truth, strict=True)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if place is not None:
            found.append(margins.of.get((req.rid, place), float("inf")))  # inf: by the prefill
    return found


def part_only_at_near_ties(reqs: list[Any], margins: Margins, expected: list[list[int]]) -> None:
    found = parted(reqs, margins, expected)
    print(f"{len(found)} of {len(reqs)} part, at margins of {sorted(found)}")
    assert all(margin < NEAR_TIE for margin in found), found


def ask(run: InProcess, ids: list[list[int]], **options: Any) -> list[Any]:
    """Run requests at the same time, and return them finished."""
    reqs = [run.add(prompt, **{**N, **options}) for prompt in ids]
    run.run(*reqs)
    return reqs


def together(run: InProcess, ids: list[list[int]], **options: Any) -> list[list[int]]:
    """The answers of requests that run at the same time."""
    return [list(req.output_ids) for req in ask(run, ids, **options)]
