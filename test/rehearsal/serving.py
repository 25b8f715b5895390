"""All kinds of requests, joining and ending at any time, and what each says alone."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from test.forced import Forced
from test.inprocess import InProcess
from test.worker.conftest import facts, prompt

SHARED = prompt(900, 36)  # two pages and a bit that several prompts begin with
N = {"max_new_tokens": 20, "ignore_eos": True}


@dataclass
class Asked:
    ids: list[int]
    options: dict[str, Any]
    answer: dict[str, Any] | None = None  # without speculation, graphs and company


def engine(folder: Path, backend: str, draft: bool = True, **flags: Any) -> InProcess:
    flags = {
        "attention_backend": backend,
        "disable_piecewise_cuda_graph": True,  # torch compiles these for the device
        "cuda_graph_bs": [2, 4],
        "max_running_requests": 4,
        "context_length": 256,
    } | flags
    return InProcess(str(folder / "target"), str(folder / "draft") if draft else None, **flags)


def all_kinds() -> dict[str, Asked]:
    """Each answer is the target's alone, but for those that are drawn."""
    return {
        "greedy": Asked(SHARED, N),
        "short": Asked(prompt(901, 3), N | {"max_new_tokens": 9}),
        "logprobs": Asked(prompt(902, 20), N | {"return_logprob": True, "top_logprobs_num": 2}),
        "grammar": Asked(prompt(903, 10), {"regex": "(t01[0-9]|t02[0-9]){8}"}),
        "penalties": Asked(prompt(904, 17), N | {"frequency_penalty": 0.7, "min_new_tokens": 4}),
        "sampled": Asked(prompt(905, 12), N | {"temperature": 0.9, "top_k": 4, "top_p": 0.9}),
        "bias": Asked(prompt(906, 8), N | {"logit_bias": {"17": 3.0}}),
        "radix": Asked(SHARED + prompt(907, 5), N),
        "stop": Asked(SHARED, {"max_new_tokens": 20}),
    }


def answer(folder: Path, asked: dict[str, Asked], **flags: Any) -> None:
    """Fill in the answers. `stop` is then told to end at a token in its middle."""
    flags = {"disable_cuda_graph": True, "disable_radix_cache": True} | flags
    with engine(folder, "fa3", draft=False, **flags) as run:

        def alone(one: Asked) -> dict[str, Any]:
            req = run.add(one.ids, **one.options)
            run.run(req)
            return facts(req)

        if "stop" in asked:
            ids = alone(asked["stop"])["ids"]
            end = next(i for i in range(8, 20) if ids[i] not in ids[:i])
            asked["stop"].options["stop_token_ids"] = [ids[end]]
        for one in asked.values():
            one.answer = alone(one)


def forced(run: InProcess) -> Forced:
    """Drafts of which 0 to all are right, in turn."""
    counts = itertools.cycle([3, 0, 7, 1, 5])
    run.worker.drafter = Forced(run.worker.drafter, lambda _: next(counts))
    return run.worker.drafter


def serve(run: InProcess, asked: dict[str, Asked], apart: int = 2) -> dict[str, Any]:
    """Requests that join so many steps apart and end when they end, by name."""
    drafts, reqs = forced(run), {}
    for name, one in asked.items():
        reqs[name] = run.add(one.ids, **one.options)
        drafts.truth[reqs[name].rid] = one.answer["ids"]
        for _ in range(apart):
            run.step()
    run.run(*reqs.values())
    return reqs


def assert_exact(reqs: dict[str, Any], asked: dict[str, Asked]) -> None:
    """What a client sees is what it sees without speculation."""
    for name, req in reqs.items():
        found, told = facts(req), asked[name].answer
        if name == "sampled":
            assert len(found["ids"]) == len(told["ids"])
            continue
        for field in ("ids", "reason", "logprob_ids"):
            assert found[field] == told[field], (name, field, found[field], told[field])
        for ours, theirs in zip(found["logprobs"] or (), told["logprobs"] or (), strict=True):
            assert abs(ours - theirs) < 1e-4, name
