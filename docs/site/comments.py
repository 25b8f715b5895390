"""The comment of a field is its docstring in the reference, where the field has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import griffe

NO_TEXT = ("type:", "noqa")


class Comments(griffe.Extension):
    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        if attr.docstring is None and (text := _comment(attr)):
            attr.docstring = griffe.Docstring(text, parent=attr)


def _comment(attr: griffe.Attribute) -> str:
    """The comment behind a field, or else the lines of comment above it."""
    path = attr.filepath
    if attr.lineno is None or attr.endlineno is None or not isinstance(path, Path):
        return ""
    lines = attr.lines_collection[path]
    behind: str = lines[attr.endlineno - 1].partition("  # ")[2]  # the formatter's form
    if behind and not behind.startswith(NO_TEXT):
        return behind
    above: list[str] = []
    for line in reversed(lines[: attr.lineno - 1]):
        if not line.lstrip().startswith("# "):
            break
        above.insert(0, line.strip().removeprefix("# "))
    return "\n".join(above)
