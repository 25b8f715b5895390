"""The table in the rehearsal's README."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "rehearsal"


def test_every_file_has_a_row() -> None:
    rows = re.findall(r"^\| `(test_\w+\.py)` \|", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(file.name for file in FOLDER.glob("test_*.py"))
