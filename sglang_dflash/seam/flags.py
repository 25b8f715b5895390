"""Whether DFLASH is the speculative algorithm of a server. Gates ask; hook functions do not."""

from __future__ import annotations

from typing import Any

from sglang_dflash.seam import release

# Where SGLang's objects keep the object that knows the server arguments.
OWNERS = ("server_args", "tokenizer_manager", "openai_serving_chat", "scheduler", "tp_worker")


def is_dflash(server_args: Any) -> bool:
    """Whether these server arguments ask for DFLASH. SGLang takes the name in any case."""
    return (server_args.speculative_algorithm or "").upper() == "DFLASH"


def attention_tp_size(server_args: Any) -> int:
    """Ranks among which the attention of a target is divided, and its draft."""
    replicas = server_args.dp_size if server_args.enable_dp_attention else 1
    return int(server_args.tp_size // replicas)


def names_no_other(server_args: Any, *_: Any, **__: Any) -> bool:
    """Whether these server arguments ask for DFLASH or for no speculation."""
    return server_args.speculative_algorithm is None or is_dflash(server_args)


def serves_dflash(*args: Any, **kwargs: Any) -> bool:
    """Whether a call in SGLang belongs to a DFLASH server: the gate of most hooks.

    One of its first two arguments leads to the server arguments, or `server_args` does, or
    `spec_algorithm`. Otherwise the process decides.
    """
    for owner in (*args[:2], kwargs.get("server_args"), kwargs.get("spec_algorithm")):
        known = _known_to(owner)
        if known is not None:
            return known
    return process_serves_dflash()


def process_serves_dflash(*_: Any, **__: Any) -> bool:
    """Whether the server of this process serves DFLASH: the gate of hooks inside a forward."""
    return is_dflash(release.server_args())


def _known_to(owner: Any) -> bool | None:
    if hasattr(owner, "is_dflash"):  # SGLang's `SpeculativeAlgorithm`
        return bool(owner.is_dflash())
    if hasattr(owner, "speculative_algorithm"):
        return is_dflash(owner)
    if hasattr(owner, "spec_algorithm"):
        return _known_to(owner.spec_algorithm)
    for name in OWNERS:
        if hasattr(owner, name):
            return _known_to(getattr(owner, name))
    return None
