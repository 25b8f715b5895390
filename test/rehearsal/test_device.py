"""The simulated device follows CUDA's rules. Otherwise the other tests would show nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from sglang_dflash.backends.page_tables import fill_tables
from sglang_dflash.kernels import argmax, biased_argmax, store_kv
from sglang_dflash.kernels.accept import accept_in_torch, launch_accept
from sglang_dflash.kernels.argmax import largest_in_torch, launch_largest
from sglang_dflash.kernels.biased_argmax import biased_largest_in_torch, launch_biased_largest
from sglang_dflash.kernels.next_block import launch_next_block, next_block_in_torch
from test.rehearsal.device.attention import attend
from test.rehearsal.device.memory import LOG, DeviceError

CUDA = "cuda"


@pytest.fixture
def graph() -> torch.cuda.CUDAGraph:
    return torch.cuda.CUDAGraph()


def test_where_tensors_are() -> None:
    host, device = torch.ones(3), torch.ones(3, device=CUDA)
    assert (host.is_cuda, device.is_cuda, device.device.type) == (False, True, CUDA)
    assert (device + 1).is_cuda
    assert device.view(3, 1).is_cuda
    assert torch.empty_like(device).is_cuda
    assert nn.Linear(2, 2, device=CUDA).weight.is_cuda
    assert device.to(torch.float64).is_cuda
    assert not device.cpu().is_cuda
    assert torch.tensor([1], device=CUDA).is_cuda
    with torch.device(CUDA):
        assert torch.arange(3).is_cuda
        assert torch.tensor([1]).is_cuda
    with torch.device("meta"):
        assert torch.tensor([1]).is_meta


def test_host_and_device_do_not_meet() -> None:
    device = torch.ones(3, device=CUDA)
    with pytest.raises(DeviceError, match="meet"):
        device + torch.ones(3)
    with pytest.raises(DeviceError, match="host tensor by a device"):
        torch.ones(3)[torch.zeros(1, dtype=torch.int64, device=CUDA)]
    with pytest.raises(TypeError):
        device.numpy()
    assert (device + torch.ones(())).is_cuda  # a number


@pytest.mark.parametrize(
    "ask",
    [
        lambda t: t.tolist(),
        lambda t: t.item(),
        lambda t: bool(t),
        lambda t: int(t),
        lambda t: t.cpu(),
        lambda t: t.to("cpu"),
        lambda t: t[t > 0],
        lambda t: t.nonzero(),
        lambda t: t.repeat_interleave(t),
        lambda t: t[torch.tensor([0])],
        lambda t: torch.tensor([1], device=t.device),
        lambda t: torch.cuda.synchronize(),
    ],
)
def test_what_makes_the_host_wait(
    graph: torch.cuda.CUDAGraph, ask: Callable[[Tensor], object]
) -> None:
    """Each call waits once. In a graph it is refused."""
    tensor = torch.ones(1, dtype=torch.int64, device=CUDA)
    LOG.clear()
    ask(tensor)
    assert len(LOG.waits) == 1
    with pytest.raises(DeviceError, match="graph"), torch.cuda.graph(graph):
        ask(tensor)


def test_what_does_not() -> None:
    tensor = torch.ones(4, device=CUDA)
    LOG.clear()
    tensor[tensor > 0] = 2.0
    tensor.where(tensor > 1, 0.0).argmax().clamp(max=2)
    torch.ones(4, pin_memory=True).to(CUDA, non_blocking=True)
    tensor.to("cpu", non_blocking=True)
    tensor.repeat_interleave(2)
    assert LOG.waits == []
    assert LOG.copies == ["to device", "to host"]


def test_a_copy_arrives_when_it_was_waited_for() -> None:
    first, event = torch.ones(2, device=CUDA).to("cpu", non_blocking=True), torch.cuda.Event()
    event.record()
    second = torch.ones(2, device=CUDA).to("cpu", non_blocking=True)
    assert first.isnan().all()
    event.synchronize()
    assert first.tolist() == [1, 1]
    assert second.isnan().all()


def test_an_event_is_over_with_the_copies_before_it() -> None:
    first, then = torch.cuda.Event(), torch.cuda.Event()
    torch.ones(2, pin_memory=True).to(CUDA, non_blocking=True)
    first.record()
    torch.ones(2, device=CUDA).to("cpu", non_blocking=True)
    then.record()
    assert not first.query()
    first.synchronize()
    assert (first.query(), then.query()) == (True, False)


@pytest.mark.parametrize("pinned", [True, False])
def test_what_a_copy_reads_may_change_once_it_was_waited_for(pinned: bool) -> None:
    """Pageable memory may change at once, because the call reads it before it returns."""
    host = torch.ones(2, pin_memory=pinned)
    host.to(CUDA, non_blocking=True)
    torch.cuda.synchronize()
    host.fill_(2)
    host.to(CUDA, non_blocking=True)
    host.fill_(3)
    with pytest.raises(DeviceError, match="changed") if pinned else nullcontext():
        torch.cuda.synchronize()


def test_a_replay_reads_and_writes_where_the_capture_did(graph: torch.cuda.CUDAGraph) -> None:
    given, out = torch.ones(3, device=CUDA), torch.zeros(3, device=CUDA)
    with torch.cuda.graph(graph):
        made = given * 2
        made.add_(1)
        out.copy_(made)
    assert made.isnan().all()
    given.fill_(5)
    graph.replay()
    assert made.tolist() == out.tolist() == [11, 11, 11]


def test_graphs_leave_nothing_for_each_other(graph: torch.cuda.CUDAGraph) -> None:
    given, other = torch.ones(3, device=CUDA), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = given * 2
    with torch.cuda.graph(other):
        given + 1
    graph.replay()
    assert made.tolist() == [2, 2, 2]
    other.replay()
    assert made.isnan().all()


def test_what_the_host_does_is_not_captured(graph: torch.cuda.CUDAGraph) -> None:
    given = torch.ones(1, device=CUDA)
    steps: list[int] = []
    with torch.cuda.graph(graph):
        made = given + len(steps)
    steps.append(1)
    graph.replay()
    assert made.tolist() == [1]


@triton.jit
def _double(x, n, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(x + at, 2 * tl.load(x + at, at < n), at < n)


def test_triton(graph: torch.cuda.CUDAGraph) -> None:
    """A kernel is interpreted, captured, and refused for memory of the host."""
    x = torch.ones(5, device=CUDA)
    LOG.clear()
    _double[(2,)](x, 5, block=4)
    assert x.tolist() == [2] * 5
    assert len(LOG.launches) == 1
    with torch.cuda.graph(graph):
        _double[(2,)](x, 5, block=4)
    x.fill_(3)
    graph.replay()
    assert x.tolist() == [6] * 5
    with pytest.raises(DeviceError, match="host tensor"):
        _double[(2,)](torch.ones(5), 5, block=4)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("left", [-1, 3])
def test_attention_equals_torch(causal: bool, left: int) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 4, 16), torch.randn(9, 2, 16), torch.randn(9, 2, 16)
    seen = torch.ones(3, 9, dtype=torch.bool)
    at, key = torch.arange(6, 9)[:, None], torch.arange(9)
    if causal:
        seen &= key <= at
    if left >= 0:
        seen &= key >= at - left
    query, keys, values = (t.transpose(0, 1) for t in (q, k, v))
    expected = nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=seen, scale=0.3, enable_gqa=True
    )
    found, _ = attend(q, k, v, 0.3, causal, left, softcap=0.0)
    torch.testing.assert_close(found, expected.transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("layers", "ropes"), [(3, 1), (2, 2)])
@pytest.mark.parametrize(("heads", "dim"), [(2, 128), (1, 96), (3, 64), (1, 256)])
def test_context_kv_equals_its_reference(
    dtype: torch.dtype, layers: int, ropes: int, heads: int, dim: int
) -> None:
    """The kernel runs in Triton's interpreter."""
    torch.manual_seed(0)
    n, size = 8, 40
    kv = torch.randn(n, layers, 2, heads, dim).to(dtype).to(CUDA)
    weight, cos_sin = torch.rand(layers, dim).to(dtype), torch.randn(n, ropes, dim)
    slots = 1 + torch.randperm(size - 1)[:n]
    slots[2] = slots[5] = 0  # not written
    written = []
    for store in (store_kv.store_kv_in_torch, store_kv.launch_store_kv):
        pools = [
            [torch.zeros(size, heads, dim, dtype=dtype, device=CUDA) for _ in range(layers)]
            for _ in "kv"
        ]
        given = weight.to(CUDA), 1e-6, cos_sin.to(CUDA), slots.to(CUDA)
        store(kv, *given, store_kv.Pools.of(*pools))
        written.append([torch.stack(each).cpu() for each in pools])
    assert not any(pool[:, 0].any() for pool in written[1])
    (k_torch, v_torch), (k_kernel, v_kernel) = ([p[:, 1:] for p in pair] for pair in written)
    assert torch.equal(v_torch, v_kernel)
    written_to = v_torch.abs().sum(dim=(0, 2, 3)).nonzero().squeeze(1) + 1
    assert written_to.tolist() == slots[slots > 0].sort().values.tolist()
    unit = torch.finfo(dtype).eps * k_torch.abs().max().item()  # two roundings, and cancellation
    torch.testing.assert_close(k_torch, k_kernel, rtol=0, atol=2 * unit)


@pytest.mark.parametrize("width", [1, 5, 16])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("ragged", [True, False])
def test_acceptance_equals_its_reference(width: int, given: bool, ragged: bool) -> None:
    torch.manual_seed(width)
    rows = 40
    drawn = torch.randint(3, (rows, width), device=CUDA)
    slots = torch.randint(1, 99, (rows, width + 3), device=CUDA)[:, :width]
    block = torch.randint(3, (rows, width + 2), device=CUDA)[:, :width]
    block[::2, 1:] = drawn[::2, :-1]
    count = torch.randint(width, (rows,), device=CUDA) if given else None
    widths = torch.randint(1, width + 1, (rows,), device=CUDA) if ragged else None
    asked = block, drawn, slots, torch.randint(90, (rows,), device=CUDA), 80, count, widths
    for ours, reference in zip(launch_accept(*asked), accept_in_torch(*asked), strict=True):
        assert torch.equal(ours.cpu(), reference.cpu())


@pytest.mark.parametrize("size", [2, 7, 16])
def test_the_next_block_equals_its_reference(size: int) -> None:
    torch.manual_seed(size)
    rows = 5
    table = torch.randint(1000, (9, 64), dtype=torch.int32, device=CUDA)
    lens = torch.randint(64 - size, (rows,), device=CUDA)
    where = torch.randperm(9, device=CUDA)[:rows]
    asked = lens * 2, lens, where, table, size, 150
    for ours, reference in zip(launch_next_block(*asked), next_block_in_torch(*asked), strict=True):
        assert torch.equal(ours.cpu(), reference.cpu())


def logits(rows: int, size: int, dtype: torch.dtype) -> Tensor:
    """Rows of a padded vocabulary, with ties, infinities and one row of NaN."""
    made = (torch.randn(rows, size + 7) * 3).round(decimals=1).to(dtype)[:, :size]
    made[0] = float("-inf")
    made[0, size // 2] = made[1, 3] = float("inf")
    made[2, size - 1] = made[2, 1] = 1000.0
    made[3] = float("nan")
    return made.to(CUDA)


@pytest.mark.parametrize("size", [5, 4096, 10_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("return_probs", [True, False])
def test_the_largest_logit_equals_its_reference(
    size: int, dtype: torch.dtype, return_probs: bool
) -> None:
    torch.manual_seed(size)
    asked = logits(9, size, dtype)
    ours, reference = (
        launch_largest(asked, return_probs),
        largest_in_torch(asked.cpu(), return_probs),
    )
    assert torch.equal(ours[0].cpu(), reference[0])
    sane = slice(4, None)
    assert torch.equal(ours[1].cpu()[sane], reference[1][sane])
    assert (ours[2] is None) == (reference[2] is None) == (not return_probs)
    if ours[2] is not None and reference[2] is not None:
        torch.testing.assert_close(ours[2].cpu()[sane], reference[2][sane])
        torch.testing.assert_close(ours[2].cpu()[2], torch.tensor([2.0]))


@pytest.mark.parametrize(("tokens", "size", "rank"), [(1, 5, 3), (9, 1000, 200), (40, 10_000, 16)])
@pytest.mark.parametrize("return_probs", [True, False])
def test_the_largest_biased_logit_equals_its_reference(
    tokens: int, size: int, rank: int, return_probs: bool
) -> None:
    """Whole numbers, so that both sum without error and ties are ties. Tokens are apart in memory.

    Only in fp32: Triton's interpreter multiplies the bits of bf16 as integers.
    """
    torch.manual_seed(size)
    made = torch.randint(-9, 9, (tokens, 2, size + 7)).float()[:, 1, :size]
    made[0, size - 1] = float("nan")
    latent, weight = (torch.randint(-1, 2, (n, rank)).float() for n in (tokens, size))
    ours = launch_biased_largest(made.to(CUDA), latent.to(CUDA), weight.to(CUDA), return_probs)
    reference = biased_largest_in_torch(made, latent, weight, return_probs)
    assert torch.equal(ours[0].cpu(), reference[0])
    assert torch.equal(ours[1].cpu()[1:], reference[1][1:])
    assert (ours[2] is None) == (reference[2] is None) == (not return_probs)
    if ours[2] is not None and reference[2] is not None:
        torch.testing.assert_close(ours[2].cpu()[1:], reference[2][1:])


def test_no_number_of_rows_compiles_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The constants of both kernels do not depend on the batch."""
    seen: set[tuple[tuple[str, int], ...]] = set()

    class Watched:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *_, **constants: seen.add(tuple(constants.items()))

    for kernel in ("_largest_of_parts", "_largest_of_tokens"):
        monkeypatch.setattr(argmax, kernel, Watched())
    monkeypatch.setattr(biased_argmax, "_largest_biased_of_parts", Watched())
    weight = torch.empty(10_000, 64, device=CUDA)
    for rows in (1, 3, 16, 100, 768, 5000):
        logits = torch.empty(rows, 10_000, device=CUDA)
        argmax.launch_largest(logits, return_probs=False)
        launch_biased_largest(logits, weight[:rows], weight)
    assert len(seen) == 4  # two reductions of other upper bounds


@pytest.mark.parametrize("page", [1, 4])
def test_tables_are_those_of_the_requests(page: int) -> None:
    torch.manual_seed(page)
    table = torch.randint(50, (6, 1), dtype=torch.int32) * 2400 + torch.arange(2400)
    rows, lens = torch.tensor([4, 0, 2]), torch.tensor([3, 2300, 1030])
    filled, pages = torch.zeros(3, dtype=torch.int32), torch.full((3, 2400 // page), -1).int()
    filled, pages, width = filled.to(CUDA), pages.to(CUDA), 8
    given = table.int().to(CUDA), rows.to(CUDA), lens.to(CUDA)
    fill_tables(*given, width, page, filled, pages)
    assert filled.tolist() == (lens + width).tolist()
    for row, length, found in zip(rows, filled.tolist(), pages.cpu(), strict=True):
        held = -(-length // page)
        assert torch.equal(found[:held], table[row, :length:page].int() // page)
        assert bool((found[held:] == -1).all())
    widths, starts = torch.tensor([5, 0, 8]).int(), torch.zeros(4, dtype=torch.int32, device=CUDA)
    fill_tables(*given, width, page, filled, pages, widths.to(CUDA), starts)
    assert filled.tolist() == (lens + widths).tolist()
    assert starts.tolist() == [0, 5, 5, 13]
