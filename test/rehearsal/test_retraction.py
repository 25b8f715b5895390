"""Memory runs out while serving, on each attention backend of a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.settings.options import VERIFY_WIDTH
from test.checkpoints import prompt
from test.cuts import verify_any_rows
from test.rehearsal.mutation import mutate
from test.rehearsal.serving import (
    Asked,
    N,
    answer,
    assert_exact,
    engine,
    once_each,
    serve,
)

pytestmark = pytest.mark.ci


@pytest.mark.parametrize(("backend", "page"), once_each(["fa3", "flashinfer", "triton"], [16, 1]))
def test_retraction(small: Path, backend: str, page: int) -> None:
    """There is too little KV for all. Some are retracted, all finish correctly, no slot is lost."""
    crowded(small, backend, page)


def test_memory_that_is_not_counted(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutation: SGLang counts no memory for the next step."""
    mutate(monkeypatch, "step.slots:Slots.needed", "return tokens", "return 0")
    with pytest.raises(AssertionError, match="check_decode_mem promises"):
        crowded(small, "fa3", 1)


@pytest.mark.parametrize(("backend", "page"), once_each(["fa3", "triton"], [16, 1]))
def test_retraction_with_any_rows(
    small: Path, monkeypatch: pytest.MonkeyPatch, backend: str, page: int
) -> None:
    monkeypatch.setenv(VERIFY_WIDTH, "auto")
    crowded(small, backend, page, any_rows=True)


def crowded(small: Path, backend: str, page: int, any_rows: bool = False) -> None:
    options = N | {"max_new_tokens": 40}
    asked = answer(small, {str(i): Asked(prompt(920 + i, 20), options) for i in range(4)})
    flags: dict[str, Any] = {
        "page_size": page,
        "max_total_tokens": 176,
        "schedule_conservativeness": 0.01,
        "cuda_graph_bs": [4],
    }
    with engine(small, backend, **flags) as run:
        if any_rows:
            verify_any_rows(run.worker)
        free = run.allocator.available_size()
        reqs = serve(run, asked, apart=0)
        run.scheduler.flush_cache()
        assert run.allocator.available_size() == free
    assert sum(req.retraction_count for req in reqs.values()) > 0
    assert_exact(reqs, asked)
