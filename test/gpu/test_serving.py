"""Serving on a GPU: backends, page sizes, graphs, and all kinds of requests at once."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from sglang.srt.model_executor.piecewise_cuda_graph_runner import PiecewiseCudaGraphRunner
from sglang.srt.sampling.penaltylib.orchestrator import BatchedPenalizerOrchestrator

from sglang_dflash.settings.options import DRAFT_AHEAD
from test.gpu.conftest import (
    DRY_RUN,
    ON_GPU,
    TOKENIZER,
    N,
    accept_length,
    engine,
    prompts,
    together,
)
from test.inprocess import InProcess

pytestmark = ON_GPU

PATTERN = r"(yes|no)[0-9]{3}"
KINDS: dict[str, dict[str, Any]] = {
    "greedy": N,
    "logprobs": N | {"return_logprob": True, "top_logprobs_num": 2},
    "grammar": {"regex": PATTERN, "max_new_tokens": 40},
    "penalties": N | {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "min_new_tokens": 8},
    "bias": N | {"logit_bias": {"17": 4.0}},
    "sampled": N | {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
}
EXACT = [kind for kind in KINDS if kind != "sampled"]


def all_kinds(run: InProcess, kinds: list[str]) -> dict[str, Any]:
    """A request of each kind in one batch."""
    reqs = {
        kind: run.add(ids, **KINDS[kind])
        for kind, ids in zip(kinds, prompts(len(kinds)), strict=True)
    }
    run.run(*reqs.values())
    return reqs


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("backend", ["triton", "fa3", "flashinfer"])
def test_all_kinds_of_requests(backend: str, page: int, graphs: bool) -> None:
    """All requests finish, acceptance is as on a CPU, and each answer fits its kind of request."""
    flags: dict[str, Any] = {
        "attention_backend": backend,
        "page_size": page,
        "disable_cuda_graph": not graphs,
    }
    with engine(**flags) as run:
        verify, replayed = run.worker.verifier.verify, []

        def watched(batch: Any, block: Any) -> Any:
            verified = verify(batch, block)
            replayed.append(verified.result.can_run_cuda_graph)
            return verified

        run.worker.verifier.verify = watched
        plain = [run.add(ids, max_new_tokens=96) for ids in prompts(6)]
        run.run(*plain)
        reqs = all_kinds(run, list(KINDS))
    assert set(replayed) == {graphs} or DRY_RUN
    assert accept_length(plain) > 6
    said = TOKENIZER.decode(reqs["grammar"].output_ids_through_stop, skip_special_tokens=True)
    assert re.fullmatch(PATTERN, said)
    assert len(reqs["sampled"].output_ids) == N["max_new_tokens"]
    info = reqs["logprobs"].logprob
    assert len(info.output_token_logprobs_val) == N["max_new_tokens"]
    assert all(math.isfinite(value) and value <= 0 for value in info.output_token_logprobs_val)
    best = [values[0] for values in info.output_top_logprobs_val]
    assert info.output_token_logprobs_val == pytest.approx(best, abs=1e-6)


def test_prefill_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill graphs of SGLang return the hidden states, so acceptance is as without graphs."""
    replayed, replay = [], PiecewiseCudaGraphRunner.replay

    def watched(graphs: Any, batch: Any, **kwargs: Any) -> Any:
        output = replay(graphs, batch, **kwargs)
        replayed.append((len(batch.input_ids), len(output.hidden_states)))
        return output

    monkeypatch.setattr(PiecewiseCudaGraphRunner, "replay", watched)
    found = []
    for graphs in (False, True):
        sizes: dict[str, Any] = {
            "disable_piecewise_cuda_graph": not graphs,
            "piecewise_cuda_graph_tokens": [64, 512],
        }
        with engine(**sizes) as run:
            reqs = []
            for ids in prompts(6):  # one at a time: graphs of the same size are replayed
                reqs.append(run.add(ids, max_new_tokens=96))
                run.run(reqs[-1])
        found.append(accept_length(reqs))
    assert len(replayed) >= 6 or DRY_RUN
    assert all(tokens == states for tokens, states in replayed)
    assert found[1] == pytest.approx(found[0], rel=0.1)


@pytest.fixture(scope="module")
def truth(native: None) -> dict[str, Any]:
    """The target's answers without speculation, in fp32. Additive penalties come first.

    Otherwise, their order is that of a Python set, which differs from process to process.
    """
    begin = BatchedPenalizerOrchestrator.__init__

    def ordered(orchestrator: Any, vocab_size: int, batch: Any, penalizers: Any) -> None:
        by_name = sorted(penalizers, key=lambda penalizer: penalizer.__name__)
        begin(orchestrator, vocab_size, batch, by_name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchedPenalizerOrchestrator, "__init__", ordered)
        with engine(draft=False, attention_backend="triton", dtype="float32") as run:
            return all_kinds(run, EXACT) | {"plain": together(run, prompts(32))}


@pytest.mark.parametrize("ahead", ["off", "on"])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("page", [1, 16])
def test_fp32_tokens_are_the_targets(
    monkeypatch: pytest.MonkeyPatch, truth: dict[str, Any], page: int, graphs: bool, ahead: str
) -> None:
    """In fp32 all tokens equal those without speculation. So do logprobs, up to rounding."""
    monkeypatch.setenv(DRAFT_AHEAD, ahead)
    flags: dict[str, Any] = {
        "page_size": page,
        "disable_cuda_graph": not graphs,
        "dtype": "float32",
    }
    with engine(attention_backend="triton", **flags) as run:
        found = all_kinds(run, EXACT)
        plain = together(run, prompts(32))
    assert plain == truth["plain"]
    for kind, req in found.items():
        expected = truth[kind]
        assert req.output_ids_through_stop == expected.output_ids_through_stop, kind
        if req.return_logprob:
            ours, theirs = (r.logprob.output_token_logprobs_val for r in (req, expected))
            assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-3)
