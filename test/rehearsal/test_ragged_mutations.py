"""Mutations of the code for any rows: each makes an answer wrong, or the device sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_dflash.settings.options import VERIFY_WIDTH
from test.cuts import verify_any_rows
from test.rehearsal.device.memory import DeviceError
from test.rehearsal.mutation import Change, mutate
from test.rehearsal.serving import Asked, all_kinds, answer, assert_exact, engine, serve

pytestmark = pytest.mark.ci

WRONG = (AssertionError, RuntimeError, IndexError, DeviceError)
MUTATIONS = [
    ("adaptive.row_graphs:RowGraphs.forward_batch", "= block.ragged.lens", "= block.width"),
    ("adaptive.row_graphs:RowGraphs.forward_batch", "backend.lens.zero_()", "pass"),
    ("backends.fa3:begin_forward", "forward_batch.seq_lens,", "forward_batch.seq_lens - 1,"),
    ("backends.triton:fill_starts", "lens[:bs]", "lens[:bs] * 0"),
    ("kernels.accept:launch_accept", "        widths,", "        None,"),
    ("method.block:Block.unflatten", "[self.ragged.indices]", "[self.ragged.indices * 0]"),
]


@pytest.fixture(scope="module")
def asked(small: Path) -> dict[str, Asked]:
    kinds = all_kinds()
    return answer(small, {n: kinds[n] for n in ("greedy", "logprobs", "radix", "penalties")})


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[f"{m[0]}-{m[1]}" for m in MUTATIONS])
def test_mutations(
    small: Path, asked: dict[str, Asked], monkeypatch: pytest.MonkeyPatch, mutation: Change
) -> None:
    monkeypatch.setenv(VERIFY_WIDTH, "auto")
    mutate(monkeypatch, *mutation)
    with pytest.raises(WRONG):
        served_in_any_rows(small, asked, "triton" if "triton" in mutation[0] else "fa3")


def served_in_any_rows(small: Path, asked: dict[str, Asked], backend: str) -> None:
    with engine(small, backend) as run:
        verify_any_rows(run.worker)
        assert_exact(serve(run, asked), asked)
