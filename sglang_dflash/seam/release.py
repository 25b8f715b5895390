"""The releases of SGLang that this package serves, and the one that is installed."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

SERVED = {"0.5.13.post1": "v0_5_13", "0.5.23": "v0_5_23"}  # and their folders
# In words. Releases between them or after them have other interfaces.
NAMES = " and ".join(SERVED)
PINS = " or ".join(f"sglang=={name}" for name in SERVED)


@cache
def installed() -> str:
    """The release that is installed."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "of unknown version"


def has_own_scheduler_step() -> bool:
    """Whether this package runs the decode step itself, as it does on SGLang's last spec-v1.

    On later releases SGLang's own DFLASH worker runs it, with parts of this package inside.
    """
    return SERVED.get(installed()) == "v0_5_13"


def module(room: str, name: str) -> Any:
    """A module of a room's folder for the release that is installed, which is served."""
    return import_module(f"sglang_dflash.{room}.{SERVED[installed()]}.{name}")


def server_args() -> Any:
    """SGLang's arguments of the server of this process; raises if there is none."""
    if has_own_scheduler_step():
        from sglang.srt.server_args import get_global_server_args

        return get_global_server_args()
    from sglang.srt.runtime_context import get_server_args

    return get_server_args()
