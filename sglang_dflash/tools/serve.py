"""A server of the bundled pair, with the defaults that suit this machine."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NoReturn

from sglang_dflash.tiny import DRAFT, TARGET, require_weights

if TYPE_CHECKING:
    from sglang_dflash.settings.platforms import Platform


def _platform() -> Platform:
    """The platform that SGLang picks on this machine."""
    import torch  # takes a second

    from sglang_dflash.settings.platforms import PLATFORMS

    return PLATFORMS["cuda" if torch.cuda.is_available() else "cpu"]


def flags(dflash: bool = True) -> list[str]:
    """Flags of SGLang's server; raises `Refusal` if the pair is not installed."""
    require_weights()
    given = ["--model-path", str(TARGET), "--log-level", "info", *_platform().pair_flags]
    if dflash:
        given += ["--speculative-algorithm", "DFLASH"]
        given += ["--speculative-draft-model-path", str(DRAFT)]
    return given


def environment() -> dict[str, str]:
    """The environment to add. A number of threads that is given wins."""
    threads = _platform().pair_threads
    if threads is None:
        return {}
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}


def run(port: int, others: list[str]) -> NoReturn:
    """Become the server. others: further flags of SGLang; they win."""
    # A grammar may allow blanks without end, and the bundled target then writes them.
    own = ["--host", "127.0.0.1", "--port", str(port), "--sleep-on-idle"]
    own += ["--constrained-json-disable-any-whitespace"]
    command = [sys.executable, "-m", "sglang.launch_server", *flags(), *own, *others]
    os.execve(command[0], command, {**os.environ, **environment()})
