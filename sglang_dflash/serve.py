"""A server of the bundled pair, with the defaults that suit this machine."""

from __future__ import annotations

import os
import sys

from sglang_dflash.tiny import DRAFT, TARGET


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def flags(dflash: bool = True) -> list[str]:
    """Flags of SGLang's server. On a CPU the pair is served in fp32, which is faster there."""
    given = ["--model-path", str(TARGET), "--log-level", "info"]
    if not _has_gpu():
        given += ["--dtype", "float32"]
    if dflash:
        given += ["--speculative-algorithm", "DFLASH"]
        given += ["--speculative-draft-model-path", str(DRAFT)]
    return given


def environment() -> dict[str, str]:
    """The environment to add. On a CPU such small forwards are fastest on one thread."""
    return {} if _has_gpu() else {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}


def run(port: int, others: list[str]) -> int:
    """Become the server. others: further flags of SGLang; they win."""
    # A grammar may allow blanks without end, and the bundled target then writes them.
    own = ["--host", "127.0.0.1", "--port", str(port), "--sleep-on-idle"]
    own += ["--constrained-json-disable-any-whitespace"]
    command = [sys.executable, "-m", "sglang.launch_server", *flags(), *own, *others]
    os.execve(command[0], command, {**os.environ, **environment()})
