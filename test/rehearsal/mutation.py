"""Mutations of our own code. A check that passes with every mutation would show nothing."""

from __future__ import annotations
import __future__

import inspect
import textwrap
from importlib import import_module
from typing import Any, TypeAlias

import pytest

Change: TypeAlias = tuple[str, str, str]  # what `mutate` takes: function, old, new


def mutate(monkeypatch: pytest.MonkeyPatch, function: str, old: str, new: str) -> None:
    """Replace `old`, which must occur once in the source of a function of this package, by `new`.

    function: "module:name" or "module:Class.name", in the module where the callers look it up.
    """
    place, _, name = function.partition(":")
    module = import_module(f"sglang_dflash.{place}")
    kind, _, name = name.rpartition(".")
    owner = getattr(module, kind) if kind else module
    original = inspect.unwrap(vars(owner)[name])
    source = textwrap.dedent(inspect.getsource(original))
    assert source.count(old) == 1, f"{function} has {source.count(old)} of {old!r}"
    flags = __future__.annotations.compiler_flag
    code = compile(source.replace(old, new), f"<mutated {function}>", "exec", flags)
    made: dict[str, Any] = {}
    exec(code, original.__globals__, made)
    monkeypatch.setattr(owner, name, made[name])
