"""Options that SGLang does not have: flags, or variables for users of `sglang.Engine`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sglang_dflash.errors import Refusal
from sglang_dflash.settings.platforms import Platform, platform_of

VERIFY_WIDTH = "SGLANG_DFLASH_VERIFY_WIDTH"
DRAFT_AHEAD = "SGLANG_DFLASH_DRAFT_AHEAD"
FEATURES = "SGLANG_DFLASH_FEATURES"
FEATURES_FORM = "SGLANG_DFLASH_FEATURES_FORM"
FLAGS = {  # by the variable that each one takes the place of
    VERIFY_WIDTH: "--speculative-dflash-verify-width",
    DRAFT_AHEAD: "--speculative-dflash-draft-ahead",
    FEATURES: "--speculative-dflash-features",
    FEATURES_FORM: "--speculative-dflash-features-form",
}
FORMS = ("speculators", "specforge")  # of features, the first is the default
# The flags of the command line whose server arguments are made now, by variable.
NO_FLAGS: Mapping[str, str] = MappingProxyType({})
_given = ContextVar("flags of this package", default=NO_FLAGS)


def add_cli_args(_: None, parser: argparse.ArgumentParser) -> None:
    """AFTER `ServerArgs.add_cli_args`."""
    parser.add_argument(
        FLAGS[VERIFY_WIDTH],
        metavar="{full,N,auto}",
        help="Number of positions of a DFLASH block that the target verifies. auto verifies the "
        "likeliest of the batch, as many as pay. Default: auto on a CPU, full on CUDA.",
    )
    parser.add_argument(
        FLAGS[DRAFT_AHEAD],
        metavar="{on,off}",
        help="Queue the draft of the next DFLASH block before the host handles results. "
        "Default: on with CUDA, off on a CPU.",
    )
    parser.add_argument(
        FLAGS[FEATURES],
        metavar="FOLDER",
        help="Write the features that train a DFLASH draft into this folder, of each request that "
        'asks for them by "custom_params": {"features": true}.',
    )
    parser.add_argument(
        FLAGS[FEATURES_FORM],
        metavar="{speculators,specforge}",
        help="The trainer that reads the features. Default: speculators.",
    )


def flags_of(namespace: argparse.Namespace) -> dict[str, str]:
    """The flags of this package on a command line, by the variable that each takes the place of."""
    given = {}
    for variable, flag in FLAGS.items():
        value = getattr(namespace, flag.removeprefix("--").replace("-", "_"), None)
        if value is not None:
            given[variable] = str(value)
    return given


@contextmanager
def flags_given(flags: Mapping[str, str]) -> Iterator[None]:
    """Server arguments are made of a command line with these flags."""
    token = _given.set(flags)
    try:
        yield
    finally:
        _given.reset(token)


def with_flags(original: Callable[..., Any], cls: type, namespace: argparse.Namespace) -> Any:
    """AROUND `ServerArgs.from_cli_args`: SGLang's class has no fields for flags of this package.

    The arguments are handled inside this call, and `Options` is kept with them.
    """
    with flags_given(flags_of(namespace)):
        return original(cls, namespace)


def given_flags() -> list[str]:
    """The flags of this package on the command line that is handled now."""
    return [FLAGS[variable] for variable in _given.get()]


def _asked(variable: str, default: str) -> str:
    """The value of a flag, else of its variable."""
    return _given.get().get(variable) or os.environ.get(variable, default)


@dataclass(frozen=True)
class Features:
    """Where features for training are written, and for which trainer."""

    folder: Path
    form: str  # of FORMS

    @classmethod
    def read(cls) -> Features | None:
        """Read flags and environment. None: no folder is given. Raises `Refusal`."""
        folder, form = _asked(FEATURES, ""), _asked(FEATURES_FORM, FORMS[0])
        if form not in FORMS:
            raise Refusal(
                f"--speculative-dflash-features-form (or {FEATURES_FORM}) {form!r} does not work.",
                f"Give {' or '.join(FORMS)}.",
            )
        if not folder:
            return None
        if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
            raise Refusal(
                f"--speculative-dflash-features (or {FEATURES}) {folder!r} is not a folder that "
                "can be written to.",
                "Make the folder first.",
            )
        return cls(Path(folder).absolute(), form)


@dataclass(frozen=True)
class Options:
    """How a server drafts and verifies."""

    block_size: int  # positions N of a whole block, the anchor included
    verify_widths: tuple[int, ...]  # allowed, ascending; with several, each step chooses
    draft_ahead: bool  # the next block is drafted while the host commits this one
    features: Features | None  # None: no request can have them

    @classmethod
    def read(cls, server_args: Any) -> Options:
        """Read flags and environment for server arguments with a block size; raises `Refusal`."""
        block_size = int(server_args.speculative_num_draft_tokens)
        platform = platform_of(server_args)
        widths = asked_width(server_args)
        ahead = asked_ahead(server_args)
        if ahead not in ("on", "off"):
            raise Refusal(
                f"--speculative-dflash-draft-ahead (or {DRAFT_AHEAD}) {ahead!r} does not work.",
                "Give on or off.",
            )
        verified = _verify_widths(widths, block_size, platform)
        return cls(block_size, verified, ahead == "on", Features.read())

    @property
    def shown_width(self) -> str:
        """The verify width as the flag gives it."""
        if len(self.verify_widths) > 1:
            return "auto"
        [width] = self.verify_widths
        return "full" if width == self.block_size else str(width)

    @property
    def reserved_tokens(self) -> int:
        """KV slots that a decode step needs after a request's committed tokens.

        A block that is drafted ahead begins after all tokens that the step before it may commit.
        These are at most one block.
        """
        return self.block_size * (2 if self.draft_ahead else 1)


def asked_width(server_args: Any) -> str:
    """The verify width as it is given, or its default."""
    default = "full" if server_args.enable_dp_attention else platform_of(server_args).verify_width
    return _asked(VERIFY_WIDTH, default)


def asked_ahead(server_args: Any) -> str:
    """Whether to draft ahead, as it is given, or its default."""
    return _asked(DRAFT_AHEAD, platform_of(server_args).draft_ahead)


def has_adapters(server_args: Any) -> bool:
    """Whether a server with these arguments loads adapters, now or later.

    SGLang lets --lora-paths alone turn --enable-lora on, but only after all other arguments.
    """
    enabled: bool | None = server_args.enable_lora
    return bool(server_args.lora_paths) if enabled is None else enabled


def _verify_widths(asked: str, block_size: int, platform: Platform) -> tuple[int, ...]:
    if asked == "full":
        return (block_size,)
    if asked == "auto" and platform.ragged_widths:
        return tuple(range(1, block_size + 1))
    if asked == "auto":  # each width has an attention backend and graphs of its own
        quarters = {max(2, block_size * i // 4) for i in range(1, 5)}
        return tuple(sorted(quarters))
    if not asked.isdecimal() or not 2 <= int(asked) <= block_size:
        raise Refusal(
            f"--speculative-dflash-verify-width (or {VERIFY_WIDTH}) {asked!r} does not work.",
            f"Give full, auto, or 2 to {block_size}.",
        )
    return (int(asked),)
