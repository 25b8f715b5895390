"""The error that a user can correct."""

from __future__ import annotations

import pickle
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import ProcessError
from typing import Generic, TypeVar

# SGLang's own DFLASH serves some things that were not compared with this package.
BUILT_IN = "Or, on a GPU, set SGLANG_PLUGINS=dflash_cpu for SGLang's own DFLASH."
WITHOUT_DFLASH = "Serve it without --speculative-algorithm DFLASH."  # a fix of many
# What SGLang raises when it reads tensors of a stranger.
WRONG_WEIGHTS = (
    *(AssertionError, AttributeError, EOFError, LookupError, RuntimeError, TypeError, ValueError),
    # They may be pickled, or in memory that another process shares.
    *(OSError, ImportError, ProcessError, pickle.UnpicklingError),
)
LONGEST = 2000  # characters of half a paragraph; a checkpoint's own text may be any length

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxlist = _SHORT.maxdict = _SHORT.maxtuple = 20
_SHORT.maxstring = _SHORT.maxother = 200


def shown(value: object) -> str:
    """A stranger's value as a message quotes it. A long or deep one is shortened."""
    return _SHORT.repr(value)


class Refusal(ValueError):
    """A checkpoint, a flag or a request that cannot be served exactly.

    what: the reason. fix: the change that a user can make. Both are whole sentences: they begin
    with a capital letter and end with a full stop. At the command line the process prints both as
    one paragraph, without a traceback, and exits with status 1. `sglang.Engine` raises it. If it
    depends on the loaded target, the scheduler logs it, and SGLang kills the process tree.
    """

    def __init__(self, what: str, fix: str) -> None:
        self.what = in_one_paragraph(what)
        self.fix = in_one_paragraph(fix)
        super().__init__(self.what, self.fix)  # pickle calls the class with these two

    def __str__(self) -> str:
        return f"{self.what} {self.fix}"


class Unreachable(Refusal):
    """The model hub did not answer, so nothing is known about the checkpoint."""


F = TypeVar("F")


@dataclass(frozen=True)
class Rule(Generic[F]):
    """What is refused, on facts of type F.

    `what` and `fix` are those of the `Refusal`. They are format strings: `f` is the facts, and
    `found` is the result of `applies`. Pages list the rules.
    """

    subject: str  # as a page names it, Markdown
    applies: Callable[[F], object]  # anything false: the rule does not apply
    what: str
    fix: str

    def refusal(self, facts: F) -> Refusal | None:
        found = self.applies(facts)
        if not found:
            return None
        return Refusal(
            self.what.format(f=facts, found=found), self.fix.format(f=facts, found=found)
        )


def refuse(rules: Iterable[Rule[F]], facts: F) -> None:
    """Raise the refusal of the first rule that applies."""
    for rule in rules:
        refusal = rule.refusal(facts)
        if refusal is not None:
            raise refusal


def in_one_paragraph(text: str) -> str:
    """The text as a part of one paragraph: it may quote names and values of a stranger's file.

    Line breaks and control characters, which a terminal would obey, become escapes. The middle of a
    very long text is left out.
    """
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
