"""The three attention backends of a GPU: every request is answered as without speculation."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Qwen3ForCausalLM

from sglang_dflash.flags import DRAFT_AHEAD
from test.checkpoints import draft_config, draft_weights, write_draft
from test.reference import Semantics, draft_block
from test.rehearsal.device.memory import DeviceError
from test.rehearsal.mutation import mutate
from test.rehearsal.serving import N, Asked, all_kinds, answer, assert_exact, engine, forced, serve
from test.worker.conftest import facts, prompt

BACKENDS = ["fa3", "flashinfer", "triton"]
PAGES = [1, 16]


@pytest.fixture(scope="module")
def asked(small):
    asked = all_kinds()
    answer(small, asked)
    return asked


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_kinds_of_requests(small, asked, backend, page):
    """Batches change while they are served; a prefix is cached; a stop lies inside a block."""
    with engine(small, backend, page_size=page) as run:
        reqs = serve(run, asked)
    assert_exact(reqs, asked)
    assert reqs["stop"].finished_reason.to_json()["type"] == "stop"
    assert reqs["radix"].cached_tokens >= 32
    assert reqs["greedy"].spec_verify_ct < 12


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_retraction(small, backend, page):
    """Too little KV for all: some are taken back, all end as they should, nothing is lost."""
    asked = {str(i): Asked(prompt(920 + i, 20), N | {"max_new_tokens": 40}) for i in range(4)}
    answer(small, asked)
    flags = {"page_size": page, "max_total_tokens": 176, "schedule_conservativeness": 0.01}
    with engine(small, backend, **flags) as run:
        free = run.allocator.available_size()
        reqs = serve(run, asked, apart=0)
        run.scheduler.flush_cache()
        assert run.allocator.available_size() == free
    assert sum(req.retraction_count for req in reqs.values()) > 0
    assert_exact(reqs, asked)
