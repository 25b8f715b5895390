"""The page about SGLang's defects, and the program that shows them."""

from __future__ import annotations

from pathlib import Path

from benchmark.upstream import CASES, FLAGS

PAGE = Path(__file__).parents[2] / "benchmark" / "UPSTREAM.md"


def test_every_case_is_on_the_page() -> None:
    page = " ".join(PAGE.read_text().split())
    assert [case.name for case in CASES if f"**{case.name}**" not in page] == []


def test_names_and_groups() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.group for case in CASES} == FLAGS.keys()
