"""`return_hidden_states="last"`, which `sglang.Engine` takes, and SGLang's HTTP server does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from sglang_dflash.tiny import DRAFT, TARGET
from sglang_dflash.tiny.prompts import held_out
from sglang_dflash.tools.launch import free_port
from test.servers import STRICT, chat

ENGINE = """
    import json
    import sglang

    if __name__ == "__main__":
        engine = sglang.Engine(**{arguments!r})
        given = {{"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}}
        last = engine.generate({prompt!r}, given, return_hidden_states="last")
        every = None
        if {every}:
            every = engine.generate({prompt!r}, given, return_hidden_states=True)
        engine.shutdown()
        found = (answer and answer["meta_info"]["hidden_states"] for answer in (last, every))
        print(json.dumps(list(found)))
"""
PROMPT = chat(held_out("word", 1, seed=31)[0].prompt)


def states(folder: Path, mode: str) -> list[Any]:
    """What an engine returns: the last state, and all of them unless the mode is `last`."""
    arguments: dict[str, Any] = {
        "model_path": str(TARGET),
        "dtype": "float32",
        "max_total_tokens": 4096,
        "speculative_algorithm": "DFLASH",
        "speculative_draft_model_path": str(DRAFT),
        "enable_return_hidden_states": True,
        "return_hidden_states_mode": mode,
        "nccl_port": free_port(),
    }
    script = folder / "engine.py"
    filled = dedent(ENGINE).format(arguments=arguments, prompt=PROMPT, every=mode == "full")
    script.write_text(filled)
    environment = os.environ | STRICT
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return states(tmp_path_factory.mktemp("full"), "full")


def test_it_is_the_last_of_all(full: list[Any]) -> None:
    """The answer ends inside a block."""
    last, every = full
    assert last == pytest.approx(every[-1], abs=1e-4)


def test_a_server_that_keeps_no_others(full: list[Any], tmp_path: Path) -> None:
    last, _ = states(tmp_path, "last")
    assert last == pytest.approx(full[0], abs=1e-4)
