"""How often a greedy decode step makes the host wait for the device."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from sglang_dflash.flags import DRAFT_AHEAD
from test.inprocess import InProcess
from test.worker.conftest import prompt, without_graphs

WAITS = ("tolist", "item", "cpu", "numpy", "nonzero", "__int__", "__float__", "__bool__")
ASK_A_CPU = {("argmax.py", "argmax"), ("context_kv.py", "write")}  # branches that a GPU never takes


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("ahead", ["off", "on"])
def test_one_copy_to_the_host_a_step(target, draft, monkeypatch, ahead, page):
    """Our modules read one tensor of the device a step; the lengths they sum are the host's own."""
    monkeypatch.setenv(DRAFT_AHEAD, ahead)
    seen: list[tuple[str, str, str]] = []

    def counted(name: str):
        original = getattr(torch.Tensor, name)

        def wrapper(self, *args, **kwargs):
            code = sys._getframe(1).f_code
            path = Path(code.co_filename)
            ours = path.parent.name in ("runtime", "model", "core", "kernels")
            if ours and (path.name, code.co_name) not in ASK_A_CPU:
                seen.append((path.name, code.co_name, name))
            return original(self, *args, **kwargs)

        return wrapper

    with InProcess(target, draft, page_size=page) as engine:
        without_graphs(engine)  # their forwards do not pass through our modules
        for i in range(4):
            engine.add(prompt(320 + i, 20), max_new_tokens=60, ignore_eos=True)
        for _ in range(5):
            engine.step()
        for name in WAITS:
            monkeypatch.setattr(torch.Tensor, name, counted(name))
        engine.step()
        engine.step()
        monkeypatch.undo()
    host, device = (
        ("state.py", "forward_batch", "tolist"),
        ("worker.py", "_decode", "tolist"),
    )
    assert seen == [host, device] * 2
