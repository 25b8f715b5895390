"""Mutations of our own code: a check that none of them fails would show nothing."""

from __future__ import annotations

import __future__
import inspect
import pkgutil
import sys
import textwrap
from typing import Any

import pytest


def mutate(monkeypatch: pytest.MonkeyPatch, function: str, old: str, new: str) -> None:
    """Put `new` for `old` in the source of a function of ours, "module:name" or "module:Class.name".

    `old` stands in it once; a name of another package is given in full.
    """
    module, _, name = function.partition(":")
    module = f"sglang_dflash.{module}"
    owner = pkgutil.resolve_name(f"{module}:{name}".rpartition(".")[0]) if "." in name else None
    owner = owner or sys.modules[module]
    name = name.rpartition(".")[2]
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(vars(owner)[name])))
    assert source.count(old) == 1, f"{function} has {source.count(old)} of {old!r}"
    flags = __future__.annotations.compiler_flag
    code = compile(source.replace(old, new), f"<mutated {function}>", "exec", flags)
    made: dict[str, Any] = {}
    exec(code, vars(sys.modules[module]), made)
    monkeypatch.setattr(owner, name, made[name])
