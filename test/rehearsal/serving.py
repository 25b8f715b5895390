"""All kinds of requests that join and end at any time, and the answer of each one alone."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from sglang_dflash.method.noise import SHARES, gumbel
from sglang_dflash.step.noise import is_sampled
from test.adapters import adapter_id
from test.checkpoints import LAYERS, draft_config, draft_weights, prompt, write_draft
from test.cuts import verify_any_rows
from test.forced import Forced, put_drafter
from test.inprocess import InProcess
from test.precision import LOGPROB_BOUND
from test.reference import Semantics, draft_block
from test.targets import write
from test.worker.conftest import facts

SHARED = prompt(900, 36)  # a common prefix of several prompts, a little over two pages
HEADS = {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
N = {"max_new_tokens": 16, "ignore_eos": True}


CERTAIN = {"temperature": 0.9, "top_k": 1}  # drawn, but from one token only
GRAMMAR = {"regex": "(t01[0-9]|t02[0-9]){8}", "max_new_tokens": 12}
AT_INTERVALS: dict[str, Any] = {
    "mamba_scheduler_strategy": "extra_buffer",
    "mamba_track_interval": 8,
    "max_mamba_cache_size": 32,
}
Drafts = list[tuple[str, int, list[int]]]  # request, position of the anchor, tokens


def once_each(ones: list[Any], values: list[Any]) -> list[Any]:
    """All pairs. Every one of `ones` is with one value, in turn; all but the first are `ci`.

    The other pairs are `full`.
    """
    first, *further = zip(ones, itertools.cycle(values), strict=False)
    marks = {first: ()} | dict.fromkeys(further, pytest.mark.ci)
    return [
        pytest.param(*pair, marks=marks.get(pair, pytest.mark.full))
        for pair in itertools.product(ones, values)
    ]


@dataclass
class Asked:
    ids: list[int]
    options: dict[str, Any]
    answer: dict[str, Any] = field(default_factory=dict)  # without speculation and company


def small_draft(**changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Configuration and weights of a draft of the `small` target."""
    layers = {"dflash_config": {"target_layer_ids": [0, 1]}, "num_target_layers": 2}
    config = draft_config(**HEADS | layers | {"num_hidden_layers": 1} | changes)
    return config, draft_weights(config)


def write_hybrid_pair(folder: Path) -> Path:
    """A Qwen 3.5 and a draft of it, in `target` and `draft`."""
    write(folder / "target", "Qwen3_5ForConditionalGeneration")
    write_draft(folder / "draft", *small_draft(num_target_layers=LAYERS))
    return folder


def engine(folder: Path, backend: str | None, draft: bool = True, **flags: Any) -> InProcess:
    flags = {
        "attention_backend": backend,
        "disable_piecewise_cuda_graph": True,  # torch compiles these for the device
        "enable_cudagraph_gc": True,  # else `InProcess` loses its frozen objects: slow starts
        "cuda_graph_bs": [2, 4],
        "max_running_requests": 4,
        "context_length": 256,
    } | flags
    return InProcess(str(folder / "target"), str(folder / "draft") if draft else None, **flags)


def add(run: InProcess, adapter: str | None, asked: Asked) -> Any:
    """Hand a request to a scheduler, with an adapter or without one."""
    return run.add(asked.ids, lora_id=adapter_id(run, adapter), **asked.options)


def all_kinds() -> dict[str, Asked]:
    """A request of each kind. All but the freely drawn one must get the target's answer."""
    return {
        "greedy": Asked(SHARED, N),
        "short": Asked(prompt(901, 3), N | {"max_new_tokens": 9}),
        "logprobs": Asked(prompt(902, 20), N | {"return_logprob": True, "top_logprobs_num": 2}),
        "grammar": Asked(prompt(903, 10), GRAMMAR),
        "penalties": Asked(prompt(904, 17), N | {"frequency_penalty": 0.7, "min_new_tokens": 4}),
        "sampled": Asked(prompt(905, 12), N | {"temperature": 0.9, "top_k": 4, "top_p": 0.9}),
        "bias": Asked(prompt(906, 8), N | {"logit_bias": {"17": 3.0}} | CERTAIN),
        "radix": Asked(SHARED + prompt(907, 5), N),
        "stop": Asked(SHARED, {"max_new_tokens": 16}),
    }


ANSWERS: dict[str, dict[str, Asked]] = {}  # of this process, by all that decides on them


def answer(folder: Path, asked: dict[str, Asked], **flags: Any) -> dict[str, Asked]:
    """Fill in the answers. `stop` then gets a stop token from the middle of its answer."""
    key = repr(((folder / "target").resolve(), asked, flags))
    if key not in ANSWERS:
        ANSWERS[key] = _answer(folder, asked, **flags)
    return ANSWERS[key]


def _answer(folder: Path, asked: dict[str, Asked], **flags: Any) -> dict[str, Asked]:
    flags = {"disable_cuda_graph": True, "disable_radix_cache": True} | flags
    with engine(folder, "fa3", draft=False, **flags) as run:

        def alone(one: Asked) -> dict[str, Any]:
            req = run.add(one.ids, **one.options)
            run.run(req)
            return facts(req)

        if "stop" in asked:
            ids = alone(asked["stop"])["ids"]
            end = next(i for i in range(5, 16) if ids[i] not in ids[:i])
            asked["stop"].options["stop_token_ids"] = [ids[end]]
        for one in asked.values():
            one.answer = alone(one)
    return asked


def forced(run: InProcess) -> Forced:
    """Force drafts of which 0 to all are right, in turn."""
    counts = itertools.cycle([3, 0, 7, 1, 5])
    drafter = Forced(run.worker.drafter, lambda _: next(counts))
    put_drafter(run.worker, drafter)
    return drafter


def recorded(run: InProcess) -> Drafts:
    """A list that gets the request, the anchor's position and the tokens of each drafted block."""
    drafts: Drafts = []
    propose = run.worker.drafter.propose

    def proposed(batch: Any, *where: Any) -> Any:
        block = propose(batch, *where)
        rows = zip(batch.reqs, block.positions.tolist(), block.token_ids.tolist(), strict=True)
        drafts.extend((req.rid, at[0], tokens) for req, at, tokens in rows)
        return block

    run.worker.drafter.propose = proposed
    return drafts


def serve(run: InProcess, asked: dict[str, Asked], apart: int = 2) -> dict[str, Any]:
    """Serve requests that join `apart` steps after each other. Returns them by name."""
    drafts = forced(run)
    reqs: dict[str, Any] = {}
    for name, one in asked.items():
        reqs[name] = run.add(one.ids, **one.options)
        drafts.truth[reqs[name].rid] = one.answer["ids"]
        for _ in range(apart):
            run.step()
            assert_right_so_far(reqs, asked)
    for _ in range(2000):
        if not run.step() and all(req.finished() for req in reqs.values()):
            return reqs
        assert_right_so_far(reqs, asked)
    raise AssertionError(f"not finished: {[name for name, r in reqs.items() if not r.finished()]}")


def assert_right_so_far(reqs: dict[str, Any], asked: dict[str, Asked]) -> None:
    """A wrong token ends a test at once."""
    for name, req in reqs.items():
        given, whole = list(req.output_ids), asked[name].answer["ids"]
        if name != "sampled" and not req.finished():
            assert given == whole[: len(given)], (name, given, whole)


def served(
    folder: Path,
    asked: dict[str, Asked],
    backend: str | None,
    apart: int = 2,
    any_rows: bool = False,
    **flags: Any,
) -> tuple[dict[str, Any], Drafts]:
    """Serve with these flags and check the answers. Returns the requests and all drafts.

    any_rows: of each block, whatever pays, are verified. The width is `auto`.
    """
    with engine(folder, backend, **flags) as run:
        if any_rows:
            verify_any_rows(run.worker)
        drafts = recorded(run)
        reqs = serve(run, asked, apart)
    assert_exact(reqs, asked)
    return reqs, drafts


def two_drafts(folder: Path, **flags: Any) -> None:
    """Run two drafts without a verify between them. FlashInfer plans the second one.

    The first prefill has a whole prompt and a part of one, so it drafts nothing. The second one
    drafts, and then all requests are drafted again. Nothing reads the drafts before.
    """
    lengths = enumerate((8, 20, 5, 6))
    asked = answer(folder, {str(i): Asked(prompt(960 + i, n), N) for i, n in lengths})
    flags |= {"chunked_prefill_size": 20, "cuda_graph_bs": [4]}
    with engine(folder, "flashinfer", **flags) as run:
        reqs = {name: run.add(one.ids, **one.options) for name, one in asked.items()}
        run.run(*reqs.values())
    assert_exact(reqs, asked)


def assert_exact(reqs: dict[str, Any], asked: dict[str, Asked]) -> None:
    """Check that a client sees the same as without speculation."""
    for name, req in reqs.items():
        found, told = facts(req), asked[name].answer
        if name == "sampled":
            assert len(found["ids"]) == len(told["ids"])
            continue
        for fact in ("ids", "reason", "logprob_ids"):
            assert found[fact] == told[fact], (name, fact, found[fact], told[fact])
        for ours, theirs in zip(found["logprobs"] or (), told["logprobs"] or (), strict=True):
            assert abs(ours - theirs) < LOGPROB_BOUND, name


def assert_drafts(
    folder: Path,
    reqs: dict[str, Any],
    drafts: Drafts,
    draft: tuple[dict[str, Any], dict[str, Any]] | None = None,
    **semantics: Any,
) -> None:
    """Check that plain PyTorch drafts the same blocks for these finished requests.

    draft: its configuration and weights. None: those of `small_draft`.
    """
    model = AutoModelForCausalLM.from_pretrained(folder / "target").float().eval()
    config, weights = draft or small_draft()
    expected = Semantics.of_zlab(config, **semantics)
    for req in reqs.values():
        ids = list(req.origin_input_ids) + list(req.output_ids)
        blocks = {at: block for rid, at, block in drafts if rid == req.rid and at < len(ids)}
        assert blocks
        for at, block in blocks.items():
            assert block[0] == ids[at]
            wanted = [
                draft_block(model, expected, weights, ids[: at + 1], noise=noise)
                for noise in possible_noise(req, at, len(block))
            ]
            assert block[1:] in wanted, (at, block)


def possible_noise(req: Any, anchor: int, drafts: int) -> list[Tensor]:
    """The noise of a request's drafts behind a position, at each share: [drafts, V]."""
    if not is_sampled(req):
        return [torch.zeros(drafts, 200)]
    positions = torch.arange(anchor, anchor + drafts)[:, None]
    noise = gumbel(torch.tensor([req.dflash_seed]), positions, torch.arange(200))
    return [share * req.sampling_params.temperature * noise for share in SHARES]
