"""Every file of a draft is hostile input: a paragraph or a served draft, whatever is in it.

Each mutation of a sound draft goes through `inspect` and through a server's start. A draft that is
not refused must serve: its target's own tokens, because a bad draft may cost speed only.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from rich.console import Console
from sglang.srt.server_args import ServerArgs

from sglang_dflash.errors import LONGEST, Refusal
from sglang_dflash.tiny import TARGET
from sglang_dflash.tools.inspect import Report, inspect, show
from test.arguments import arguments
from test.checkpoints import prompt
from test.damage import Folder, folders, sound, write_folder
from test.inprocess import InProcess

PROMPT, TOKENS = prompt(3, 12), 12
SECONDS = 20.0  # for one mutation on a busy machine; a hang takes longer
GIGABYTE = 10**9


class Trial:
    """Runs mutations, and counts what became of them."""

    def __init__(self, target: str) -> None:
        self.target = target
        with InProcess(target, disable_radix_cache=True) as engine:
            self.expected = engine.generate(PROMPT, max_new_tokens=TOKENS)
        self.outcomes: Counter[str] = Counter()
        self.slowest = 0.0

    def run(self, files: Folder) -> None:
        started = time.monotonic()
        with TemporaryDirectory() as parent:
            draft = Path(parent) / "draft"
            write_folder(draft, files)
            report = inspect(str(draft), self.target)
            self.outcomes[outcome := self.serve(draft)] += 1
        check_report(report)
        assert outcome == "refused" or not report.problems
        seconds = time.monotonic() - started
        assert seconds < SECONDS
        self.slowest = max(self.slowest, seconds)

    def serve(self, draft: Path) -> str:
        """Start a server with a draft and let it speak. Returns the outcome."""
        try:
            engine = InProcess(self.target, str(draft))
        except Refusal as refusal:
            check_paragraph(refusal)
            return "refused"
        with engine:
            assert engine.generate(PROMPT, max_new_tokens=TOKENS) == self.expected
        return "served"


def check_report(report: Report) -> None:
    """Both forms of a report can be printed."""
    for problem in report.problems:
        check_paragraph(problem)
    json.dumps(report.as_json())
    out = StringIO()
    show(report, Console(file=out, width=200))
    assert out.getvalue().encode()


def check_paragraph(refusal: Refusal) -> None:
    text = str(refusal)
    assert text.isprintable()
    assert len(text) < 2 * LONGEST + 100
    assert all(half[0].isupper() and half.endswith(".") for half in (refusal.what, refusal.fix))


def run_trial(target: str, count: int) -> Trial:
    """Run this many mutations, always the same ones."""
    trial = Trial(target)

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(folders())
    def mutate(files: Folder) -> None:
        trial.run(files)

    mutate()
    return trial


def peak_memory() -> int:
    """The most bytes of memory that this process has had. `getrusage` counts its parent's, too."""
    status = Path("/proc/self/status").read_text()
    [kilobytes] = re.findall(r"VmHWM:\s+(\d+) kB", status)
    return 1024 * int(kilobytes)


def main(target: str, count: int) -> None:
    """Run a trial in this process alone, and print its figures as JSON."""
    run_trial(target, 1)  # what every start allocates
    before = peak_memory()
    trial = run_trial(target, count)
    figures = {"growth": peak_memory() - before, "slowest": trial.slowest}
    print(json.dumps(figures | dict(trial.outcomes)))


@pytest.mark.parametrize("count", [40, pytest.param(80, marks=pytest.mark.ci)])
def test_mutations(target: str, count: int) -> None:
    trial = run_trial(target, count)
    assert trial.outcomes.total() == count
    assert min(trial.outcomes["refused"], trial.outcomes["served"]) > count // 16


@pytest.mark.parametrize("name", ["generation_config.json", "quant_model_description.json"])
def test_a_pipe_that_only_sglang_would_open(target: str, tmp_path: Path, name: str) -> None:
    draft = tmp_path / "draft"
    write_folder(draft, {**sound("zlab sliding"), name: os.mkfifo})
    assert Trial(target).serve(draft) == "served"


@pytest.mark.parametrize("flag", ["load_format", "speculative_draft_load_format"])
@pytest.mark.parametrize("load_format", ["pt", "npcache"])
def test_load_formats_that_open_pickles(
    target: str, draft: str, flag: str, load_format: str
) -> None:
    with pytest.raises(Refusal, match=f"The load format {load_format} opens pickles"):
        arguments(target, draft, **{flag: load_format})


def test_a_target_is_sglangs_own_without_dflash(tmp_path: Path) -> None:
    """A config that this package would not read is no reason to refuse a server without it."""
    config = json.loads((TARGET / "config.json").read_text())
    text = json.dumps(config)[:-1] + ', "model_type": "qwen3"}'
    for file in TARGET.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(text)
    assert ServerArgs(model_path=str(tmp_path)).speculative_algorithm is None
    with pytest.raises(Refusal, match="states a key twice"):
        arguments(str(tmp_path), None)


@pytest.mark.full
def test_500_mutations_in_a_gigabyte(target: str) -> None:
    code = f"from test.worker.test_hostile_files import main; main({target!r}, 500)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=3600
    )
    assert done.returncode == 0, done.stderr[-5000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["refused"] + figures["served"] == 500
    assert figures["growth"] < GIGABYTE


def test_files_of_a_target_may_be_links(target: str, draft: str, tmp_path: Path) -> None:
    """SGLang reads them itself. A draft's files may not lead out of its folder."""
    for file in Path(target).iterdir():
        (tmp_path / file.name).symlink_to(file)
    assert inspect(draft, str(tmp_path)).status == 0
    assert arguments(str(tmp_path), draft).speculative_num_draft_tokens == 8
