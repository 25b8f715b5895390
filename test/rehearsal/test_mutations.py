"""The checks of `test_serving` can fail: each mutation of our code makes one of them fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from test.checkpoints import prompt, write_draft
from test.rehearsal.device.memory import DeviceError
from test.rehearsal.mutation import Change, mutate
from test.rehearsal.serving import (
    Asked,
    N,
    all_kinds,
    answer,
    assert_drafts,
    engine,
    served,
    small_draft,
    two_drafts,
)

pytestmark = pytest.mark.ci

WORKER = "step.worker:DFlashWorker."
AHEAD = "step.draft_ahead:DraftAhead.after_verify"
WRONG = (AssertionError, RuntimeError, IndexError)

TOKENS = [
    ("kernels.accept:launch_accept", "simulated,", "seq_lens * 0 + width - 1,"),
    ("kernels.accept:launch_accept", "max_len,", "max_len - 220,"),
    ("kernels.next_block:launch_next_block", "table.stride(0),", "0,"),
    ("step.forward:VerifyInput.forward_batch", "=seq_lens,", "=seq_lens + 1,"),
    ("step.slots:Slots._alloc", "start_on_device - 1", "start_on_device * 0"),
    (AHEAD, "bonus, accepted.lens", "bonus, accepted.lens + 1"),
    ("logits.grammar:_mask_alike", "logits=dense", "logits=dense.clone()"),
    ("backends.fa3:begin_forward", "forward_batch.seq_lens,", "forward_batch.seq_lens - 1,"),
    ("backends.fa3:begin_forward", "backend.page_size,", "1,"),
    ("kernels.argmax:launch_largest", "        size,", "        size - 40,"),
]
PLAN = "step.forward:VerifyInput.generate_attn_arg_prefill"
PLANS = [
    (PLAN, "(paged_kernel_lens + width)", "(paged_kernel_lens + 1)"),
    (PLAN, "(requests + 1) * width, width", "requests + 1, 1"),
]
CONTEXT = [
    (WORKER + "_write_context", "accepted.kv_slots", "accepted.kv_slots.roll(1, dims=1)"),
    (AHEAD, "Outcome.unpack(copy.wait()).num_accepted + 1", "most_committed"),
    ("model.context_kv:ContextKV._cos_sin", "table[positions]", "table[positions + 1]"),
    ("model.draft:DFlashDraftModel.forward", "width)[:, 0]", "width)[:, 1]"),
    ("kernels.argmax:noise_arguments", "noise.first,", "noise.first + 1,"),
    ("model.context_kv:ContextKV._stack", "p.weight[outputs]", "p.weight[outputs].flip(0)"),
]


@pytest.fixture(scope="module")
def asked(small: Path) -> dict[str, Asked]:
    return answer(small, all_kinds())


@pytest.mark.parametrize("mutation", TOKENS, ids=lambda mutation: mutation[2])
def test_tokens(
    small: Path,
    asked: dict[str, Asked],
    monkeypatch: pytest.MonkeyPatch,
    mutation: Change,
) -> None:
    mutate(monkeypatch, *mutation)
    with pytest.raises(WRONG):
        served(small, asked, "fa3", page_size=16)


@pytest.mark.parametrize("mutation", PLANS, ids=lambda mutation: mutation[2])
def test_what_flashinfer_plans(
    small: Path,
    asked: dict[str, Asked],
    monkeypatch: pytest.MonkeyPatch,
    mutation: Change,
) -> None:
    mutate(monkeypatch, *mutation)
    with pytest.raises(WRONG):
        served(small, asked, "flashinfer")


def test_a_backend_that_is_not_told_that_a_graph_begins(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(
        monkeypatch,
        "backends.fa3:begin_forward_of_chosen",
        "chosen.init_",
        "False and chosen.init_",
    )
    asked = answer(small, {"one": Asked(prompt(957, 20), N)})
    with pytest.raises(WRONG):
        served(small, asked, "fa3", decode_attention_backend="triton")


def test_memory_that_a_plan_is_copied_from(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch, "backends.flashinfer:Plans.__call__", "not self._copied.query()", "False")
    with pytest.raises(DeviceError, match="pinned memory changed"):
        two_drafts(small)


@pytest.mark.parametrize("mutation", CONTEXT, ids=lambda mutation: mutation[2])
def test_what_the_draft_sees(
    small: Path, monkeypatch: pytest.MonkeyPatch, mutation: Change
) -> None:
    """Tokens are still right, but drafts are not, so acceptance would fall."""
    mutate(monkeypatch, *mutation)
    sampled = N | {"temperature": 0.9, "top_k": 40}
    kinds = {"one": Asked(prompt(990, 12), N), "sampled": Asked(prompt(990, 9), sampled)}
    reqs, drafts = served(small, answer(small, kinds), "flashinfer")
    with pytest.raises(AssertionError):
        assert_drafts(small, reqs, drafts)


def test_page_tables_without_room_for_a_block(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch, "engine.v0_5_13.hooks:room_for_a_block", "+= runner", "+= 0 * runner")
    asked = answer(small, {"long": Asked(prompt(950, 20), N | {"max_new_tokens": 74})})
    with pytest.raises(AssertionError, match="the page table has room for 96"):
        served(small, asked, "fa3", page_size=16, context_length=96)


def test_a_window_that_stays_closed(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch, "backends.fa3:share_schedules", "left, -1", "left, 0")
    windows = {"layer_types": ["sliding_attention"], "sliding_window": 16}
    method = {"target_layer_ids": [0, 1], "causal": False}
    windowed = small_draft(dflash_config=method, **windows)
    (tmp_path / "target").symlink_to(small / "target")
    write_draft(tmp_path / "draft", *windowed)
    asked = answer(tmp_path, {"one": Asked(prompt(955, 30), N)})
    reqs, drafts = served(tmp_path, asked, "fa3", cuda_graph_bs=[1])
    with pytest.raises(AssertionError):
        assert_drafts(tmp_path, reqs, drafts, windowed, layers=[("zlab", 16, False)])


def test_a_window_that_is_not_told(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's Triton backend then has no list of the window's KV."""
    told = "return max(lefts, default=None)"
    function = "model.draft:DFlashDraftModel.get_attention_sliding_window_size"
    mutate(monkeypatch, function, told, "return None")
    windows = {"layer_types": ["sliding_attention"], "sliding_window": 16}
    (tmp_path / "target").symlink_to(small / "target")
    write_draft(tmp_path / "draft", *small_draft(**windows))
    with pytest.raises(Exception, match="NoneType"):
        engine(tmp_path, "fa3", speculative_draft_attention_backend="triton")
