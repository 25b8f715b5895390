"""A DFLASH server's arguments, and starts that end with a refusal."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from sglang.srt.server_args import ServerArgs

from test import inprocess  # loads the plugin

assert inprocess


def arguments(target: str, draft: str | None, **changes: Any) -> ServerArgs:
    return ServerArgs(
        model_path=target,
        speculative_algorithm="DFLASH",
        speculative_draft_model_path=draft,
        **changes,
    )


def launch(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sglang.launch_server", *flags, "--port", "1"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )


def refused(result: subprocess.CompletedProcess[str]) -> str:
    """Check for one paragraph, and return it."""
    assert result.returncode == 1
    if "Failed to apply hooks" not in result.stderr:  # SGLang logs its own traceback then
        assert "Traceback" not in result.stderr
    [line] = [line for line in result.stderr.splitlines() if line.startswith("sglang-dflash:")]
    assert "Uvicorn running" not in result.stdout + result.stderr
    return line
