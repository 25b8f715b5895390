"""docs/flags.csv has every flag of SGLang, and its refused commands are refused.

Its last column says how a verdict is known. A file is a test. "try_flags: NAME" means that
`python -m test.try_flags NAME` started a server on a CPU with this and other flags, asked it for a
chat, streams and a grammar, got the tokens of a server without them, and ended it. "read" means
that SGLang's code was read, and nothing was run. "loop" is this file.
"""

from __future__ import annotations

import argparse
import csv
import os
import pickle
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from sglang.srt.server_args import ServerArgs, prepare_server_args

from sglang_dflash.errors import Refusal
from sglang_dflash.settings import options
from sglang_dflash.tiny import DRAFT, TARGET
from test import inprocess  # loads the plugin
from test.try_flags import TRIED

assert inprocess
TEST = Path(__file__).parents[1]
TABLE = TEST.parent / "docs" / "flags.csv"
VERDICTS = ("honoured", "harmless", "refused", "not tried")
SERVED = (
    *("--model-path", str(TARGET), "--dtype", "float32"),
    *("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(DRAFT)),
)


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    commands: tuple[str, ...]  # flags; one that is refused has a value
    verdict: str
    why: str
    known_by: str

    @property
    def flags(self) -> list[str]:
        return [command.split()[0] for command in self.commands]


def rows() -> list[Row]:
    found = []
    with TABLE.open(newline="") as file:
        _, *lines = csv.reader(file)
    for _, flags, verdict, why, known_by in lines:
        found.append(Row(tuple(flags.split(", ")), verdict, why, known_by))
    return found


ROWS = rows()
REFUSED = {command: row for row in ROWS if row.verdict == "refused" for command in row.commands}


def parser() -> argparse.ArgumentParser:
    """The parser of `python -m sglang.launch_server`, with the flags of all plugins."""
    made = argparse.ArgumentParser()
    ServerArgs.add_cli_args(made)
    return made


def start(*command: str) -> ServerArgs:
    """The server arguments of a command line, checked as they are before the start."""
    made = ServerArgs.from_cli_args(parser().parse_args([*SERVED, *command]))
    made.check_server_args()
    return made


def test_every_flag_is_in_the_table() -> None:
    actions = parser()._actions
    sglangs = {flag for action in actions for flag in action.option_strings}
    ours = {flag for row in ROWS for flag in row.flags}
    assert sglangs - ours == set(), "docs/flags.csv lacks flags of SGLang"
    assert ours - sglangs == set(), "docs/flags.csv has flags that SGLang lacks"


def test_each_row_says_how_it_is_known() -> None:
    """A flag has one row, or one more with a value that is refused."""
    served: list[str] = []
    dests = {flag: action.dest for action in parser()._actions for flag in action.option_strings}
    for row in ROWS:
        assert row.verdict in VERDICTS, row
        tried = re.findall(r"try_flags: ([a-z ]+)", row.known_by)
        for name in tried:
            given = {dests[part] for part in TRIED[name] if part.startswith("--")}
            assert {dests[flag] for flag in row.flags} <= given, (name, row.flags)
        for file in re.findall(r"\w+(?:/[\w.]+)+", row.known_by):
            assert (TEST / file).exists(), file
        if row.verdict == "not tried":
            assert not tried, row
        else:
            assert row.known_by, row
        if row.verdict != "refused":
            served += row.commands
    assert len(served) == len(set(served))
    assert all(" " not in command for command in served)


@pytest.mark.parametrize("command", REFUSED)
def test_what_is_refused(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """By this package in one paragraph that names the flag or its value, or by SGLang."""
    for name in list(os.environ):
        monkeypatch.setenv(name, os.environ[name])  # server arguments set some
    by_sglang = REFUSED[command].why.startswith("by SGLang")
    with pytest.raises((AssertionError, ValueError)) as caught:
        start(*command.split())
    assert isinstance(caught.value, Refusal) != by_sglang, caught.value
    if not by_sglang:
        message = str(caught.value)
        assert any(part in message for part in command.split()), message
        assert "\n" not in message


def test_a_file_of_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--config reads flags from a file, those of this package among them."""
    monkeypatch.setenv(options.VERIFY_WIDTH, "full")  # the flag changes it
    file = tmp_path / "flags.yaml"
    file.write_text("max-total-tokens: 8192\nspeculative-dflash-verify-width: 4\n")
    made = prepare_server_args([*SERVED, "--config", str(file)])
    assert made.max_total_tokens == 8192
    assert pickle.loads(pickle.dumps(made)).dflash.verify_widths == (4,)
    assert prepare_server_args([*SERVED]).dflash.shown_width == "full"  # the variable's again
