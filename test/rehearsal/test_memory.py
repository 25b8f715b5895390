"""The planned GPU memory equals the allocated memory: weights, KV pools, graph buffers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sglang.srt.layers.rotary_embedding.factory import _ROPE_DICT
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch import Tensor, nn

from test.checkpoints import BLOCK, HIDDEN, LAYERS, VOCAB, write_draft
from test.inprocess import InProcess
from test.rehearsal.device import cuda, memory
from test.rehearsal.mutation import mutate
from test.rehearsal.serving import engine, small_draft
from test.rehearsal.targets import write_kind

pytestmark = pytest.mark.ci

DRAFT = {"num_target_layers": LAYERS, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_draft(tmp_path_factory.mktemp("draft"), *small_draft(**DRAFT)))


ROOM = 32 * 2**20  # free bytes, as if other processes held the rest of the 80 GiB
FRACTION = 0.5
BF16, FP32 = 2, 4
ONE_HEAD = 2 * 64 * BF16  # K and V
PER_TOKEN: dict[
    str, int | tuple[int, int]
] = {  # bytes of target KV; a pair: the pool of full layers, the pool of windows
    "dense": LAYERS * ONE_HEAD,
    "MLA": LAYERS * (64 + 16) * BF16,  # the latent, and the rotated part
    "MoE": LAYERS * ONE_HEAD,
    "sliding window": LAYERS * ONE_HEAD,
    "two KV pools": (LAYERS // 2 * ONE_HEAD, LAYERS // 2 * ONE_HEAD),
}
OF_THE_DRAFT = 2 * ONE_HEAD


class Meter:
    """Counts the bytes of every storage on the device, and reports the rest as free to SGLang."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used = 0
        mark = memory.mark

        def counted(tensor: Tensor) -> Tensor:
            storage: Any = mark(tensor).untyped_storage()
            if not getattr(storage, "counted", False):
                storage.counted, size = True, storage.nbytes()
                self.used += size
                weakref.finalize(storage, self._gone, size).atexit = False
            return tensor

        monkeypatch.setattr(memory, "mark", counted)
        free = lambda *_: (ROOM - self.used, cuda.MEMORY)  # noqa: E731
        monkeypatch.setattr(torch.cuda, "mem_get_info", free)

    def _gone(self, size: int) -> None:
        self.used -= size

    def read(self) -> int:
        gc.collect()
        return self.used


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Meter:
    _ROPE_DICT.clear()  # from earlier servers of this process, which this meter does not count
    return Meter(monkeypatch)


def size_of(tensors: Iterator[Tensor] | list[Tensor]) -> int:
    """Bytes on the device; shared storage counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.is_cuda]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def pool_size(pool: KVCache) -> int:
    if isinstance(pool, SWAKVPool):
        return pool_size(pool.full_kv_pool) + pool_size(pool.swa_kv_pool)
    latent = getattr(pool, "kv_buffer", None)
    return size_of(pool.k_buffer + pool.v_buffer if latent is None else latent)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory, draft: str) -> dict[str, Path]:
    """A folder with weights for each kind of target, and the draft beside it."""
    folders = {kind: tmp_path_factory.mktemp("pair") for kind in PER_TOKEN}
    for kind, folder in folders.items():
        write_kind(folder / "target", kind, weights=True)
        (folder / "draft").symlink_to(draft)
    return folders


def start(folder: Path, **given: Any) -> InProcess:
    """Let SGLang size the pools. Without graphs no forward runs, so no kernel is needed."""
    usual = {"dtype": "bfloat16", "disable_cuda_graph": True, "page_size": 16}
    room = {"max_total_tokens": None, "mem_fraction_static": FRACTION}
    flags: dict[str, Any] = usual | given | room
    return engine(folder, None, **flags)


def check_pools(run: InProcess, kind: str, bits: int = 16) -> None:
    """Both pools hold every token, and together fill the fraction that the weights leave.

    bits: of a value of the target's KV. The draft's KV is in bf16.

    SGLang adds a page to each pool that it does not count.
    """
    target, draft = run.worker.model_runner, run.worker.draft_model_runner
    tokens, page = target.max_total_num_tokens, run.server_args.page_size
    assert draft.max_total_num_tokens == tokens
    of_the_target = PER_TOKEN[kind]
    if isinstance(of_the_target, tuple):
        whole, window = (size * bits // 16 for size in of_the_target)
        in_window = int(tokens * 0.8) // page * page
        expected = whole * (tokens + page) + window * (in_window + page)
        per_token = whole + 0.8 * window
    else:
        per_token = of_the_target * bits // 16
        expected = per_token * (tokens + page)
    assert pool_size(target.token_to_kv_pool) == expected
    assert pool_size(draft.token_to_kv_pool) == OF_THE_DRAFT * (tokens + page)
    allowed = FRACTION * ROOM - size_of([*target.model.parameters(), *target.model.buffers()])
    planned = tokens * (per_token + OF_THE_DRAFT)
    assert 0.99 * allowed < planned <= allowed, f"planned {planned} of {allowed}"


@pytest.mark.parametrize(
    ("kind", "page"), [("dense", 1), ("two KV pools", 1), *((kind, 16) for kind in PER_TOKEN)]
)
def test_both_pools_fit(meter: Meter, pairs: dict[str, Path], kind: str, page: int) -> None:
    with start(pairs[kind], page_size=page) as run:
        check_pools(run, kind)


FP8_KV = {"kv_cache_dtype": "fp8_e4m3"}


@pytest.mark.parametrize("kind", ["dense", "sliding window", "two KV pools"])
def test_kv_in_fp8(meter: Meter, pairs: dict[str, Path], kind: str) -> None:
    with start(pairs[kind], **FP8_KV) as run:
        check_pools(run, kind, bits=8)


def test_a_draft_counted_in_fp8_is_seen(
    meter: Meter, pairs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutation: the draft's KV is counted with the dtype of the target's."""
    counted = "engine.v0_5_13.hooks:_draft_bytes_per_token"
    mutate(monkeypatch, counted, "runner.dtype.itemsize", "runner.kv_cache_dtype.itemsize")
    with start(pairs["dense"], **FP8_KV) as run, pytest.raises(AssertionError, match="planned"):
        check_pools(run, "dense", bits=8)


@pytest.mark.parametrize(
    ("kind", "function", "old", "new"),
    [
        (
            "dense",
            "engine.v0_5_13.hooks:cell_size",
            "result + _draft_bytes_per_token(runner)",
            "result",
        ),
        (
            "MLA",
            "engine.v0_5_13.hooks:cell_size",
            "result + _draft_bytes_per_token(runner)",
            "result",
        ),
        (
            "two KV pools",
            "engine.v0_5_13.hooks:windowed_cell_size",
            "_draft_bytes_per_token(runner)",
            "0",
        ),
        ("dense", "engine.v0_5_13.hooks:_draft_bytes_per_token", "* heads // draft", "// draft"),
        ("dense", "engine.v0_5_13.hooks:_draft_bytes_per_token", "runner.dtype.itemsize", "1"),
    ],
)
def test_a_draft_that_is_not_counted_is_seen(
    meter: Meter,
    pairs: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    function: str,
    old: str,
    new: str,
) -> None:
    mutate(monkeypatch, function, old, new)
    with start(pairs[kind]) as run, pytest.raises(AssertionError, match="planned"):
        check_pools(run, kind)


CHANNELS = 2 * 2 * 16 + 4 * 16
STATES = 2 * (4 * 16 * 16 * FP32 + CHANNELS * 3 * BF16)  # of two layers: GDN, window
INPUTS = 2 * (CHANNELS * (3 + BLOCK) + 2 * 4 * BLOCK) * BF16  # of a block, window and gates


def check_states(run: InProcess, requests: int) -> None:
    """States of as many requests as fit, and what their blocks read, beside both pools.

    SGLang adds a slot.
    """
    target = run.worker.model_runner
    pool, states = target.req_to_token_pool, target.req_to_token_pool.mamba_pool
    cache = states.mamba_cache
    assert pool.size == requests, f"{pool.size} requests"
    assert size_of([cache.temporal, *cache.conv]) == (requests + 1) * STATES
    assert size_of(states.dflash_inputs.tensors()) == requests * INPUTS
    allowed = FRACTION * ROOM - size_of([*target.model.parameters(), *target.model.buffers()])
    planned = target.max_total_num_tokens * (LAYERS // 2 * ONE_HEAD + OF_THE_DRAFT)
    planned += requests * (STATES + INPUTS)
    assert 0.97 * allowed < planned <= allowed, f"planned {planned} of {allowed}"


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory, draft: str) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    write_kind(folder / "target", "hybrid", weights=True)
    (folder / "draft").symlink_to(draft)
    return folder


@pytest.mark.parametrize(("room", "requests"), [(ROOM, 48), (ROOM // 12, 18)])
def test_states_of_a_hybrid_fit(
    meter: Meter,
    hybrid: Path,
    monkeypatch: pytest.MonkeyPatch,
    room: int,
    requests: int,
) -> None:
    """With little memory, fewer requests run than the default of 48."""
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "bfloat16")
    monkeypatch.setattr("test.rehearsal.test_memory.ROOM", room)
    flags = {"disable_radix_cache": True, "max_running_requests": None}
    with start(hybrid, **flags) as run:
        check_states(run, requests)


def stored(folder: Path) -> int:
    """Bytes of a checkpoint's tensors in BF16."""
    files = [load_file(file) for file in folder.glob("*.safetensors")]
    return sum(BF16 * tensor.numel() for file in files for tensor in file.values())


def check_weights(run: InProcess, folder: Path, used: int) -> None:
    """Account for all memory except a few kilobytes. No graph is captured.

    The draft uses the target's embedding and LM head, whose rows SGLang pads to 64.
    """
    target, draft = run.worker.model_runner, run.worker.draft_model_runner
    language, speaks = target.model, draft.model.vocabulary
    assert (speaks.embed, speaks.lm_head) == (language.model.embed_tokens, language.lm_head)
    padded = -(-VOCAB // 64) * 64
    of_the_target = stored(folder / "target") + 2 * (padded - VOCAB) * HIDDEN * BF16
    assert size_of(target.model.parameters()) == of_the_target
    of_the_draft, found = stored(folder / "draft"), size_of(draft.model.parameters())
    assert found == of_the_draft, f"{found} of the draft"
    pools = pool_size(target.token_to_kv_pool) + pool_size(draft.token_to_kv_pool)
    projections = 2 * 2 * 64 * HIDDEN * BF16  # K and V of both heads, stacked for context KV
    tables = [row for model in (target.model, draft.model) for row in rope_tables(model)]
    assert len(tables) == 2
    rows, free = target.req_to_token_pool.req_to_token, run.allocator.free_pages
    parts = of_the_target + of_the_draft + pools + projections
    others = size_of([*tables, rows, free])
    assert 0 <= used - parts - others < 4096, f"{used - parts - others} besides"


def rope_tables(model: nn.Module) -> list[Tensor]:
    return [buffer for name, buffer in model.named_buffers() if name.endswith("cos_sin_cache")]


def test_nothing_is_held_twice(meter: Meter, pairs: dict[str, Path]) -> None:
    with start(pairs["dense"]) as run:
        check_weights(run, pairs["dense"], meter.read())


@pytest.mark.parametrize(
    ("seen", "function", "old", "new"),
    [
        (
            "of the draft",
            "model.draft:DFlashDraftModel.bind",
            "self.return_probs = return_probs",
            "self.return_probs = return_probs; "
            "self.copied = nn.Parameter(target.lm_head.weight.clone())",
        ),
        ("besides", "model.context_kv:ContextKV._stack", "self._attention[0].q_size", "0"),
    ],
)
def test_a_second_copy_is_seen(
    meter: Meter,
    pairs: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    seen: str,
    function: str,
    old: str,
    new: str,
) -> None:
    """Mutations copy the LM head, or the draft's query projections."""
    mutate(monkeypatch, function, old, new)
    with start(pairs["dense"]) as run, pytest.raises(AssertionError, match=seen):
        check_weights(run, pairs["dense"], meter.read())


def buffers_size(requests: int, widths: list[int]) -> int:
    """Bytes of the graphs' inputs, in FP32, with a set for each width."""
    each = 8 + 4  # row, length
    per_token = 8 + 8 + 3 * 8 + 8  # id, position, its three parts, slot
    per_token += FP32 * HIDDEN + FP32 * VOCAB  # embedding, logits
    masks = [requests * (1 + width) * width for width in widths]
    return requests * each + requests * sum(widths) * per_token + sum(masks) + 3 * 4


def check_buffers(run: InProcess, widths: list[int]) -> None:
    """The graphs of target and draft share one set of buffers per width."""
    runners = run.worker.model_runner, run.worker.draft_model_runner
    graphs = [runner.graph_runner for runner in runners]
    assert [sorted(runner.graphs) for runner in graphs] == [[2, 4]] * 2
    held = [buffer for runner in graphs for buffer in vars(runner.buffers).values()]
    found = size_of([buffer for buffer in held if buffer is not None])
    assert found == buffers_size(4, widths), f"{found} of buffers"


def test_graphs_share_buffers(meter: Meter, small: Path) -> None:
    with start(small, dtype="float32", disable_cuda_graph=False) as run:
        check_buffers(run, [BLOCK])


def test_the_buffers_of_a_narrower_draft(meter: Meter, small: Path, tmp_path: Path) -> None:
    """A draft that predicts from the anchor has graphs of its own width."""
    (tmp_path / "target").symlink_to(small / "target")
    method = {"target_layer_ids": [0, 1], "sample_from_anchor": True}
    write_draft(tmp_path / "draft", *small_draft(dflash_config=method))
    with start(tmp_path, dtype="float32", disable_cuda_graph=False) as run:
        check_buffers(run, [BLOCK + 1, BLOCK])


def test_buffers_that_are_not_shared_are_seen(
    meter: Meter, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_for = "engine.v0_5_13.draft_worker:draft_server_args"
    mutate(monkeypatch, made_for, "width_of(block_size)", "width_of(block_size) - 1")
    with (
        start(small, dtype="float32", disable_cuda_graph=False) as run,
        pytest.raises(AssertionError, match="of buffers"),
    ):
        check_buffers(run, [BLOCK])
