"""The flags that SGLang does not have: read from the command line, or refused.

The command line hands them to the schedulers in the environment, which `Engine` users set.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from sglang_dflash.errors import Refusal

VERIFY_WIDTH = "SGLANG_DFLASH_VERIFY_WIDTH"
DRAFT_AHEAD = "SGLANG_DFLASH_DRAFT_AHEAD"


class _ToEnvironment(argparse.Action):
    """Sets the variable that `const` names."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        os.environ[self.const] = values


def add_cli_args(_: None, parser: argparse.ArgumentParser) -> None:
    """AFTER `ServerArgs.add_cli_args`."""
    parser.add_argument(
        "--speculative-dflash-verify-width",
        action=_ToEnvironment,
        const=VERIFY_WIDTH,
        metavar="{full,N,auto}",
        help="How many positions of a DFLASH block the target verifies; auto: as many as pay, "
        "and no more are drafted where the draft stands it. Default: auto on a CPU, full on CUDA.",
    )
    parser.add_argument(
        "--speculative-dflash-draft-ahead",
        action=_ToEnvironment,
        const=DRAFT_AHEAD,
        metavar="{on,off}",
        help="Queue the draft of the next DFLASH block before the host handles results. "
        "Default: on with CUDA, off on a CPU.",
    )


def verify_widths(server_args: Any) -> tuple[int, ...]:
    """How many positions of a block a step may verify; of several, each step chooses one.

    On CUDA every width has an attention backend and graphs of its own, so there are four.
    """
    block, on_cpu = int(server_args.speculative_num_draft_tokens), server_args.device == "cpu"
    asked = os.environ.get(VERIFY_WIDTH, "auto" if on_cpu else "full")
    if asked == "full":
        return (block,)
    if asked == "auto":
        quarters = {max(2, block * i // 4) for i in range(1, 5)}
        return tuple(range(1, block + 1) if on_cpu else sorted(quarters))
    if not asked.isdecimal() or not 2 <= int(asked) <= block:
        raise Refusal(
            f"--speculative-dflash-verify-width (or {VERIFY_WIDTH}) {asked!r} does not work: give "
            f"full, auto, or 2 to {block}."
        )
    return (int(asked),)


def draft_ahead(server_args: Any) -> bool:
    """Whether the next block is drafted while the host commits this one. A CPU gains nothing."""
    asked = os.environ.get(DRAFT_AHEAD, "on" if server_args.device == "cuda" else "off")
    if asked not in ("on", "off"):
        raise Refusal(
            f"--speculative-dflash-draft-ahead (or {DRAFT_AHEAD}) {asked!r} does not work: give on "
            "or off."
        )
    return asked == "on"


def reserved_tokens(server_args: Any) -> int:
    """KV slots that a decode step needs behind a request's committed tokens.

    A block drafted ahead lies behind all that the step before it may commit, which is one block.
    """
    return int(server_args.speculative_num_draft_tokens) * (2 if draft_ahead(server_args) else 1)
