"""Requests that are taken back and prefilled again get the target's own tokens, by all rules.

SGLang reserves two blocks for a request before it admits it, so a small pool alone does not make it
retract. Its own variable for tests is read when it is imported, which a fork has done already.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_dflash.tiny.prompts import held_out
from test.plugins import distribution
from test.servers import ALL_FEATURES, Client, chat, running, without_speculation

RETRACTING = """
    def plugin():
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        def retract(result, *_, **__):
            from sglang.srt.managers import scheduler

            scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL = True, 2

        initialised = "sglang.srt.managers.scheduler.Scheduler.get_init_info"
        HookRegistry.register(initialised, retract, HookType.AFTER)
"""
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"frequency_penalty": 0.7},
    {"presence_penalty": 0.6},
    {"repetition_penalty": 1.3},
    {"min_new_tokens": 60},
    {"temperature": 0.9, "sampling_seed": 7},
    {"temperature": 1.0, "sampling_seed": 8, "top_k": 8, "top_p": 0.9},
    {"regex": r"(yes|no|maybe), because [a-z ]{3,60}\."},
    {"return_logprob": True, "repetition_penalty": 1.2, "presence_penalty": 0.5},
)


def at_once(server: Client, prompts: list[str], **kind: Any) -> list[dict[str, Any]]:
    """Answers to one HTTP request: on a busy machine, several would be served one by one."""
    logprobs = kind.pop("return_logprob", False)
    sampling = {"temperature": 0, "max_new_tokens": 64} | kind
    body = {"text": prompts, "sampling_params": sampling, "return_logprob": logprobs}
    answers: list[dict[str, Any]] = server.post("/generate", body).json()
    return answers


def test_retracted_requests(tmp_path: Path) -> None:
    """Three of each kind at once. SGLang takes back the one with the shortest output."""
    prompts = [chat(example.prompt) for example in held_out("word", 3, seed=31)]
    with without_speculation() as reference:
        alone = [[reference.generate(prompt, **kind) for prompt in prompts] for kind in KINDS]
    environment = {"PYTHONPATH": str(distribution(tmp_path, "retracting", "1.0", RETRACTING))}
    with running(*ALL_FEATURES, dflash=True, environment=environment) as server:
        answers = [at_once(server, prompts, **kind) for kind in KINDS]
    for kind, ours, theirs in zip(KINDS, answers, alone, strict=True):
        assert [a["output_ids"] for a in ours] == [a["output_ids"] for a in theirs], kind
        assert any(answer["meta_info"]["num_retractions"] for answer in ours), kind
    for ours_of, theirs_of in zip(answers[-1], alone[-1], strict=True):
        logprobs = [a["meta_info"]["output_token_logprobs"] for a in (ours_of, theirs_of)]
        assert all(abs(a[0] - b[0]) < 1e-3 for a, b in zip(*logprobs, strict=True))
