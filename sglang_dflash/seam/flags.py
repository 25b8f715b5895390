"""Whether DFLASH is the speculative algorithm of a server."""

from __future__ import annotations

from typing import Any


def is_dflash(server_args: Any) -> bool:
    """Whether these server arguments ask for DFLASH. SGLang takes the name in any case."""
    return (server_args.speculative_algorithm or "").upper() == "DFLASH"


def serves_dflash() -> bool:
    """Whether the server of this process serves DFLASH."""
    from sglang.srt.server_args import get_global_server_args  # T modules need no SGLang

    return is_dflash(get_global_server_args())
