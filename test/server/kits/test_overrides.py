"""README.md lists the overridden kit tests as the code has them, and why."""

from __future__ import annotations

import inspect
from pathlib import Path

from test.server.kits import test_kits
from test.server.kits.conftest import Kit

PAGE = Path(__file__).with_name("README.md")


def overrides() -> dict[str, str | None]:
    """`Kit.test` -> reason, of every test or helper whose place is taken by one of ours."""
    found = {}
    for cls in vars(test_kits).values():
        if not (isinstance(cls, type) and issubclass(cls, Kit)):
            continue
        for name, ours in vars(cls).items():
            kits = [base for base in cls.__bases__ if hasattr(base, name)]
            if inspect.isfunction(ours) and kits and getattr(kits[0], name) is not ours:
                found[f"{kits[0].__name__}.{name}"] = ours.__doc__
    return found


def test_every_override_is_listed_with_its_reason() -> None:
    lines = PAGE.read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    assert {name.strip("`"): reason for name, reason in rows} == overrides()
    assert len(overrides()) > 10
