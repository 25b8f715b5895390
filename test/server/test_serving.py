"""Token for token the target's own answers, over HTTP, on servers of several configurations."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sglang_dflash.tiny import TARGET
from sglang_dflash.tiny.prompts import held_out
from test.server.conftest import on
from test.servers import FULL, TWO_RANKS, Client, chat

pytestmark = on("page 16, ahead", TWO_RANKS, "page 1", "page 256, no radix", "chunks of 4")


def mixed_prompts() -> list[str]:
    """32 prompts from a few to some hundred tokens."""
    rng = random.Random(11)
    kinds = {kind: held_out(kind, 12, seed=5) for kind in ("word", "json", "code")}
    prompts = [chat(e.prompt) for e in kinds["word"] + kinds["json"]]
    prompts += [e.prompt[: rng.randint(10, 400)] for e in kinds["code"]]
    rng.shuffle(prompts)
    return prompts[:32]


@pytest.fixture(scope="session")
def mixed(reference: Client) -> list[tuple[str, dict[str, Any]]]:
    """Each prompt with the target's answer."""
    prompts = mixed_prompts()
    return list(zip(prompts, reference.generate_many(prompts, max_new_tokens=96), strict=True))


def visible(answer: dict[str, Any]) -> tuple[Any, ...]:
    """What a client sees."""
    meta = answer["meta_info"]
    return (
        answer["text"],
        answer["output_ids"],
        meta["finish_reason"],
        meta["prompt_tokens"],
        meta["completion_tokens"],
    )


def test_concurrent_requests_equal_the_target(
    server: Client, mixed: list[tuple[str, dict[str, Any]]]
) -> None:
    answers = server.generate_many([prompt for prompt, _ in mixed], max_new_tokens=96)
    for answer, (_, expected) in zip(answers, mixed, strict=True):
        assert visible(answer) == visible(expected)
    steps = sum(a["meta_info"]["spec_verify_ct"] for a in answers)
    accepted = sum(a["meta_info"]["spec_num_correct_drafts"] for a in answers)
    least = 2 if FULL[0] in server.flags else 1.5
    assert (accepted + steps) / steps > least, "acceptance collapsed"
    server.flush()


def trace(server: Client, answer: dict[str, Any]) -> tuple[Any, ...]:
    """The tokens, and where whole blocks are verified how many drafts each step accepted."""
    meta = answer["meta_info"]
    counts = meta["spec_verify_ct"], meta["spec_correct_drafts_histogram"]
    return answer["output_ids"], counts if FULL[0] in server.flags else ()


def test_prefix_hits_keep_the_accept_trace(
    server: Client, mixed: list[tuple[str, dict[str, Any]]]
) -> None:
    """Whole, partial and inside-a-page hits accept what a cold prefill accepts."""
    prompt = max((p for p, _ in mixed if p.startswith("<|im_start|>")), key=len)
    variants = [prompt, prompt + "Then", prompt[: len(prompt) // 2], prompt[:-30] + " and 7"]
    for variant in variants:
        server.flush()
        cold = server.generate(variant)
        server.flush()
        server.generate(prompt)
        warm = server.generate(variant)
        assert trace(server, warm) == trace(server, cold)
        assert cold["meta_info"]["cached_tokens"] == 0
        if "--disable-radix-cache" not in server.flags and variant.startswith(prompt):
            assert warm["meta_info"]["cached_tokens"] > 0


def test_abort_in_mid_block(server: Client, mixed: list[tuple[str, dict[str, Any]]]) -> None:
    """An aborted request leaves nothing behind: the next ones answer as before."""
    answers = server.stream("def f(", max_new_tokens=8000, ignore_eos=True)
    rid = next(answers)["meta_info"]["id"]  # it runs
    assert server.post("/abort_request", {"rid": rid}).status_code == 200
    *_, last = answers
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    prompt, expected = mixed[0]
    assert visible(server.generate(prompt, max_new_tokens=96)) == visible(expected)
    server.flush()


def test_release_resume_and_weight_update(
    server: Client, mixed: list[tuple[str, dict[str, Any]]]
) -> None:
    """Weights updated from disk, memory released and resumed: the same accept trace."""
    prompt, expected = mixed[1]
    server.flush()
    before = server.generate(prompt, max_new_tokens=96)
    server.flush()  # SGLang refuses to, with new weights, while the last request is in its batch
    weights = {"model_path": str(TARGET), "recapture_cuda_graph": True}
    updated = server.post("/update_weights_from_disk", weights)
    assert updated.json()["success"], updated.text
    again = server.generate(prompt, max_new_tokens=96)
    assert trace(server, again) == trace(server, before)
    server.flush()  # SGLang ends if the last request has not left its batch yet
    assert server.post("/release_memory_occupation").status_code == 200
    assert server.post("/resume_memory_occupation").status_code == 200
    server.flush()
    after = server.generate(prompt, max_new_tokens=96)
    assert trace(server, after) == trace(server, before)
    assert visible(after) == visible(expected)
