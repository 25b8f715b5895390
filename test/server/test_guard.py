"""The guard by itself: without DFLASH, left out, and where SGLang has changed under it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from sglang_dflash.tiny import DRAFT, TARGET
from sglang_dflash.tiny.prompts import held_out
from sglang_dflash.tools.launch import free_port
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
LACKING = (
    "The guard lacks a hook (no hook on entrypoints.ollama.serving.OllamaServing.handle_chat)."
)
ENGINE = """
    import sglang

    if __name__ == "__main__":
        engine = sglang.Engine(
            model_path={target!r},
            speculative_algorithm="DFLASH",
            speculative_draft_model_path={draft!r},
            log_level="warning",
            nccl_port={port},
        )
        engine.shutdown()
"""

pytestmark = pytest.mark.ci


@pytest.mark.parametrize("mode", ["always", "dflash"])
def test_without_speculation(mode: str) -> None:
    """Other servers are left alone, unless they are to be protected, too."""
    with running(dflash=False, environment={plugin.VARIABLE: mode}) as server:
        assert server.post(*WRONG).status_code == (400 if mode == "always" else 500)
        if mode == "dflash":
            return
        wrong = {"text": "x", "sampling_params": {"stop_regex": "("}}
        answer = server.post("/generate", wrong)
        assert answer.status_code == 400
        assert "sampling_params.stop_regex is '('. It must be" in answer.text
        assert server.generate(PROMPT)["output_ids"]


def test_dflash_without_it(reference: Client) -> None:
    """A server that nobody protects: SGLang's own answers, and what DFLASH itself refuses."""
    without = {plugin.VARIABLE: "never"}
    with running(dflash=True, environment=without) as server:
        answer = server.generate(PROMPT)
        assert answer["output_ids"] == reference.generate(PROMPT)["output_ids"]
        assert answer["meta_info"]["spec_verify_ct"]
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
    assert log.count(LACKING) == 1


@pytest.mark.full
def test_an_engine_says_it_too(tmp_path: Path) -> None:
    """`sglang.Engine` serves no HTTP."""
    script = tmp_path / "engine.py"
    script.write_text(dedent(ENGINE).format(target=str(TARGET), draft=str(DRAFT), port=free_port()))
    path = {"PYTHONPATH": str(distribution(tmp_path, "renamed", "1.0", RENAMED))}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=os.environ | path
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(LACKING) == 1


def test_embeddings() -> None:
    """Of such a server it knows no requests, and lets them through."""
    flags = "--is-embedding", "--disable-radix-cache"
    with running(*flags, dflash=False, environment={plugin.VARIABLE: "always"}) as server:
        answer = server.post("/v1/embeddings", {"model": "m", "input": PROMPT})
        assert answer.json()["data"][0]["embedding"]


def test_without_a_module_of_sglang(reference: Client, tmp_path: Path) -> None:
    """DFLASH serves without the checks of HTTP bodies, and the log says so."""
    code = """
        def plugin():
            import sys

            sys.modules["sglang_dflash_guard.middleware"] = None
    """
    path = {"PYTHONPATH": str(distribution(tmp_path, "lacking", "1.0", code))}
    with running(dflash=True, environment=path) as server:
        assert server.generate(PROMPT)["output_ids"] == reference.generate(PROMPT)["output_ids"]
        assert "The guard cannot check HTTP bodies" in server.server.log.read_text()
