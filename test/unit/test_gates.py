"""Which calls in SGLang belong to a DFLASH server, and which servers the guard protects."""

from __future__ import annotations

from types import SimpleNamespace as Object
from typing import Any

import pytest

from sglang_dflash.errors import Refusal
from sglang_dflash.seam import flags
from sglang_dflash_guard import plugin

ASKS = Object(speculative_algorithm="DFLASH")
ASKS_NOT = Object(speculative_algorithm=None)


def calls(server_args: Any) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Calls as SGLang makes them, by what leads to these server arguments."""
    runner = Object(spec_algorithm=Object(is_dflash=lambda: flags.is_dflash(server_args)))
    manager = Object(server_args=server_args)
    return {
        "server arguments": ((server_args,), {}),
        "a class before them": ((int, server_args), {}),
        "a manager": ((manager, "request"), {}),
        "an API": ((Object(tokenizer_manager=manager), "request"), {}),
        "a scheduler": ((Object(scheduler=manager),), {}),
        "a worker": ((Object(tp_worker=Object(server_args=server_args)),), {}),
        "a runner": ((runner,), {}),
        "keywords": ((), {"server_args": server_args}),
        "an algorithm": ((), {"spec_algorithm": runner.spec_algorithm}),
    }


@pytest.mark.parametrize("call", calls(ASKS))
def test_a_call_leads_to_its_server(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setattr(flags, "process_serves_dflash", lambda: pytest.fail("the process"))
    for server_args, expected in ((ASKS, True), (ASKS_NOT, False)):
        args, kwargs = calls(server_args)[call]
        assert flags.serves_dflash(*args, **kwargs) is expected


@pytest.mark.parametrize("serves", [True, False])
def test_else_the_process_decides(monkeypatch: pytest.MonkeyPatch, serves: bool) -> None:
    monkeypatch.setattr(flags, "process_serves_dflash", lambda: serves)
    assert flags.serves_dflash("text", 5) is serves
    assert flags.serves_dflash() is serves


@pytest.mark.parametrize(
    ("mode", "with_dflash", "without"),
    [
        (None, True, False),
        ("", True, False),
        ("dflash", True, False),
        ("always", True, True),
        ("never", False, False),
    ],
)
def test_whom_the_guard_protects(
    monkeypatch: pytest.MonkeyPatch, mode: str | None, with_dflash: bool, without: bool
) -> None:
    if mode is None:
        monkeypatch.delenv(plugin.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(plugin.VARIABLE, mode)
    assert plugin.guards(ASKS) is with_dflash
    assert plugin.guards(ASKS_NOT) is without


def test_an_unknown_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused when server arguments are made."""
    monkeypatch.setenv(plugin.VARIABLE, "on")
    with pytest.raises(Refusal, match="SGLANG_DFLASH_GUARD is on"):
        plugin.check_mode(ASKS_NOT)
