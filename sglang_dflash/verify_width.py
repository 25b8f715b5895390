"""`--speculative-dflash-verify-width {full,N,auto}`: read from the command line, or refused."""

from __future__ import annotations

import argparse
import os
from typing import Any

from sglang_dflash.errors import Refusal

VARIABLE = (
    "SGLANG_DFLASH_VERIFY_WIDTH"  # how the flag reaches the schedulers; `Engine` users set it
)


class _ToEnvironment(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        os.environ[VARIABLE] = values


def add_cli_args(_: None, parser: argparse.ArgumentParser) -> None:
    """AFTER `ServerArgs.add_cli_args`."""
    parser.add_argument(
        "--speculative-dflash-verify-width",
        action=_ToEnvironment,
        metavar="{full,N,auto}",
        help="How many positions of a DFLASH block the target verifies; auto: as many as pay.",
    )


def verify_width(server_args: Any) -> int | None:
    """How many positions of a block are verified; None where that is chosen step by step."""
    asked, block = os.environ.get(VARIABLE, "full"), int(server_args.speculative_num_draft_tokens)
    if asked in ("full", str(block)):
        return block
    if server_args.device != "cpu":
        raise Refusal(
            f"--speculative-dflash-verify-width {asked} is served on a CPU only: CUDA graphs and "
            "attention backends verify the whole block; leave it at full."
        )
    if asked == "auto":
        return None
    if not asked.isdecimal() or not 2 <= int(asked) <= block:
        raise Refusal(
            f"--speculative-dflash-verify-width (or {VARIABLE}) {asked!r} does not work: give "
            f"full, auto, or 2 to {block}."
        )
    return int(asked)
