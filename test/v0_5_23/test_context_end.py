"""Requests that run to the end of the context, where the last blocks end behind it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dflash.engine.v0_5_23 import hooks
from test.servers import running, without_speculation

CONTEXT = 128


def test_requests_that_end_with_the_context() -> None:
    """Four at once, whose rows of slots lie one behind another."""
    flags = ("--context-length", str(CONTEXT))
    prompts = [list(range(200 + 7 * i, 230 + 7 * i)) for i in range(4)]
    end = {"max_new_tokens": CONTEXT - len(prompts[0]) - 1, "ignore_eos": True}
    with without_speculation(*flags) as reference:
        alone = [reference.generate(prompt, **end)["output_ids"] for prompt in prompts]
    body = {"input_ids": prompts, "sampling_params": {"temperature": 0, **end}}
    with running(*flags, dflash=True) as server:
        together = server.post("/generate", body).json()
    assert [answer["output_ids"] for answer in together] == alone
    assert all(len(prompts[0]) + len(ids) >= CONTEXT - 4 for ids in alone)


def test_page_tables_have_room_for_two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "get_alloc_reserve_per_decode", lambda: 32)
    runner = SimpleNamespace(model_config=SimpleNamespace(context_len=CONTEXT))

    def build(*, model_runner: Any, backend_str: str) -> tuple[str, int]:
        return backend_str, model_runner.model_config.context_len

    built = hooks.room_for_two_blocks(build, model_runner=runner, backend_str="fa3")
    assert built == ("fa3", CONTEXT + 32)
    assert runner.model_config.context_len == CONTEXT
