"""The guard by itself: without DFLASH, left out, and where SGLang has changed under it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_dflash.errors import Refusal
from sglang_dflash.tiny.prompts import held_out
from sglang_dflash_guard import plugin
from test.plugins import distribution
from test.servers import Client, chat, running

PROMPT = chat(held_out("word", 1, seed=31)[0].prompt)
WRONG = "/configure_logging", {"log_level": "x"}  # SGLang itself answers it with HTTP 500
RENAMED = """
    def plugin():
        from sglang.srt.entrypoints.ollama.serving import OllamaServing

        del OllamaServing.handle_chat
"""

pytestmark = pytest.mark.ci


def test_without_speculation() -> None:
    with running(dflash=False, environment={plugin.VARIABLE: "always"}) as server:
        assert server.post(*WRONG).status_code == 400
        wrong = {"text": "x", "sampling_params": {"max_new_tokens": [1]}}
        answer = server.post("/generate", wrong)
        assert answer.status_code == 400
        assert "sampling_params.max_new_tokens is [1]. It must be" in answer.text
        assert server.generate(PROMPT)["output_ids"]


def test_dflash_without_it(reference: Client) -> None:
    """A server that nobody protects: SGLang's own answers, and what DFLASH itself refuses."""
    without = {plugin.VARIABLE: "never"}
    with running(dflash=True, environment=without) as server:
        answer = server.generate(PROMPT)
        assert answer["output_ids"] == reference.generate(PROMPT)["output_ids"]
        assert answer["meta_info"]["spec_accepted_per_position"]
        assert server.post(*WRONG).status_code == 500
        lossy = {"server_args": {"speculative_accept_threshold_single": 0.2}}
        assert server.post("/set_internal_state", lossy).status_code == 400


def test_sglang_has_changed(reference: Client, tmp_path: Path) -> None:
    """DFLASH serves without a hook of the guard. The log names the hook, and what it was for."""
    renamed = {"PYTHONPATH": str(distribution(tmp_path, "renamed", "1.0", RENAMED))}
    with running(dflash=True, environment=renamed) as server:
        assert server.generate(PROMPT)["output_ids"] == reference.generate(PROMPT)["output_ids"]
        assert server.post(*WRONG).status_code == 400
        log = server.server.log.read_text()
    lacking = "The guard lacks a hook (no hook on entrypoints.ollama.serving.OllamaServing"
    assert f"{lacking}.handle_chat)." in log


def test_an_unknown_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.VARIABLE, "on")
    with pytest.raises(Refusal, match="SGLANG_DFLASH_GUARD is on"):
        plugin.guards()
