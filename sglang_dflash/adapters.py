"""LoRA adapters on the target, and their hooks. The draft does not know them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def has_adapters(server_args: Any) -> bool:
    """Whether a server with these arguments loads adapters, now or later.

    SGLang lets --lora-paths alone turn --enable-lora on, but only after all other arguments.
    """
    enabled: bool | None = server_args.enable_lora
    return bool(server_args.lora_paths) if enabled is None else enabled


def check_adapters(original: Callable[..., None], server_args: Any) -> None:
    """AROUND `ServerArgs.check_lora_server_args`, which refuses adapters with DFLASH."""
    algorithm = server_args.speculative_algorithm
    if algorithm == "DFLASH":
        server_args.speculative_algorithm = None
    try:
        original(server_args)
    finally:
        server_args.speculative_algorithm = algorithm
