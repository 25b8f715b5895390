"""SGLang's hierarchical cache on a GPU: drafts behind a prefix from host memory are the same."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from test.gpu.conftest import DRY_RUN, ON_GPU, engine, prompts
from test.inprocess import InProcess

pytestmark = [*ON_GPU, pytest.mark.skipif(DRY_RUN, reason="a CPU has no second memory")]

PROMPTS = prompts(24)
PREFIX, *OTHERS = (list(chain.from_iterable(PROMPTS[i : i + 4])) for i in range(0, 24, 4))
N = {"max_new_tokens": 64, "ignore_eos": True}


def again(run: InProcess, between: list[list[int]]) -> Any:
    """Serve the prefix, other prompts, and the prefix again. Returns the last request."""
    for ids in (PREFIX, *between):
        run.generate(ids, **N)
    req = run.add([*PREFIX, PREFIX[0]], **N)
    run.run(req)
    return req


def seen(req: Any) -> tuple[list[int], int, list[int]]:
    return list(req.output_ids), req.spec_verify_ct, list(req.spec_correct_drafts_histogram)


@pytest.mark.parametrize(
    ("backend", "copies"), [("fa3", "direct"), ("flashinfer", "kernel"), ("triton", "kernel")]
)
@pytest.mark.parametrize("page", [1, 32])
def test_a_hit_in_host_memory(backend: str, copies: str, page: int) -> None:
    """Copies change no bit, so tokens and accepted drafts are equal, also in bf16."""
    flags: dict[str, Any] = {
        "attention_backend": backend,
        "page_size": page,
        "max_running_requests": 1,
    }
    with engine(**flags) as run:
        kept = again(run, [])
    tokens = 4 * (len(PREFIX) // 64 * 64 + 64)
    host: dict[str, Any] = {
        "enable_hierarchical_cache": True,
        "hicache_io_backend": copies,
        "hicache_ratio": 8.0,
        "max_total_tokens": tokens,
    }
    with engine(**flags, **host) as run:
        loaded = again(run, OTHERS)
    assert loaded.cached_tokens_host > len(PREFIX) // 2
    assert seen(loaded) == seen(kept)
