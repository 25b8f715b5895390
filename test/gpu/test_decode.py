"""Decoding with the bundled pair on a GPU: synchronisations, graphs, near-ties."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner

from sglang_dflash.backends.page_tables import fill_tables
from sglang_dflash.kernels import store_kv
from sglang_dflash.kernels.accept import accept_in_torch, launch_accept
from sglang_dflash.kernels.argmax import largest_in_torch, launch_largest
from sglang_dflash.kernels.biased_argmax import launch_biased_largest
from sglang_dflash.kernels.draw import Sampling, draw_in_torch, launch_draw
from sglang_dflash.kernels.next_block import launch_next_block, next_block_in_torch
from sglang_dflash.kernels.noise import launch_gumbel
from sglang_dflash.method.noise import DraftNoise, NoiseTable
from sglang_dflash.settings.options import DRAFT_AHEAD, VERIFY_WIDTH
from test.gpu.conftest import (
    DRY_RUN,
    ON_GPU,
    Margins,
    N,
    ask,
    engine,
    part_only_at_near_ties,
    prompts,
    together,
)
from test.inprocess import InProcess

pytestmark = ON_GPU


def waits_of_steps(monkeypatch: pytest.MonkeyPatch, run: InProcess) -> tuple[list[list[str]], int]:
    """Three steady greedy steps: the files of the calls that block, and the waits for events."""
    for prompt in prompts(4):
        run.add(prompt, **N)
    for _ in range(4):
        run.step()
    step, wait = run.worker.forward_batch_generation, torch.cuda.Event.synchronize
    blocking: list[list[str]] = []
    waits: list[torch.cuda.Event] = []

    def noted(event: torch.cuda.Event) -> None:
        waits.append(event)
        wait(event)

    def watched(batch: Any) -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            with monkeypatch.context() as patch:
                patch.setattr(torch.cuda.Event, "synchronize", noted)
                result = step(batch)
            torch.cuda.set_sync_debug_mode("default")
        blocking.append([w.filename for w in caught if "called a synchronizing" in str(w.message)])
        return result

    run.scheduler.model_worker.forward_batch_generation = watched
    for _ in range(3):
        run.step()
    return blocking, len(waits)


@pytest.mark.skipif(DRY_RUN, reason="a CPU has no waits to count")
@pytest.mark.parametrize("backend", ["flashinfer", "fa3", "triton"])
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("ahead", ["off", "on"])
def test_one_copy_to_the_host_a_step(
    monkeypatch: pytest.MonkeyPatch, backend: str, page: int, ahead: str
) -> None:
    """Steady greedy decode waits for the device once: for what was committed."""
    monkeypatch.setenv(DRAFT_AHEAD, ahead)
    with engine(attention_backend=backend, page_size=page) as run:
        assert waits_of_steps(monkeypatch, run) == ([[], [], []], 3)


@pytest.mark.parametrize("backend", ["flashinfer", "fa3", "triton"])
@pytest.mark.parametrize("page", [1, 16])
def test_drafting_ahead_changes_no_token(
    monkeypatch: pytest.MonkeyPatch, backend: str, page: int
) -> None:
    """The tokens are the target's own, whether or not blocks are drafted ahead."""
    monkeypatch.setenv(DRAFT_AHEAD, "off")
    with engine(attention_backend=backend, page_size=page) as run:
        expected = together(run, prompts(6))
    monkeypatch.setenv(DRAFT_AHEAD, "on")
    with engine(attention_backend=backend, page_size=page) as run:
        margins = Margins(run)
        part_only_at_near_ties(ask(run, prompts(6)), margins, expected)


@pytest.mark.parametrize("backend", ["flashinfer", "fa3", "triton"])
def test_a_width_with_graphs_of_its_own_changes_no_token(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """Whole blocks and one width give the same tokens. Each width has graphs."""
    used, replay = set(), CudaGraphRunner.replay

    def watched(graphs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not graphs.model_runner.is_draft_worker:
            used.add((graphs.num_tokens_per_bs, batch.spec_info.draft_token_num))
        return replay(graphs, batch, *args, **kwargs)

    monkeypatch.setattr(CudaGraphRunner, "replay", watched)
    monkeypatch.setenv(VERIFY_WIDTH, "full")
    with engine(attention_backend=backend) as run:
        expected = together(run, prompts(6))
    monkeypatch.setenv(VERIFY_WIDTH, "5")
    with engine(attention_backend=backend) as run:
        margins = Margins(run)
        reqs = ask(run, prompts(6))
    assert used == {(16, 16), (5, 5)} or DRY_RUN
    part_only_at_near_ties(reqs, margins, expected)


@pytest.mark.parametrize("backend", ["flashinfer", "fa3", "triton"])
def test_padded_graphs_equal_eager(backend: str) -> None:
    """Batches of odd sizes run in larger graphs, whose padding rows write the dummy slot."""
    ids, counts = prompts(7), (1, 3, 5, 7)
    with engine(attention_backend=backend, disable_cuda_graph=True) as run:
        expected = [together(run, ids[:count]) for count in counts]
    with engine(attention_backend=backend, cuda_graph_bs=[2, 4, 8]) as run:
        margins = Margins(run)
        for count, truth in zip(counts, expected, strict=True):
            part_only_at_near_ties(ask(run, ids[:count]), margins, truth)


@pytest.mark.parametrize("backend", ["flashinfer", "fa3", "triton"])
def test_where_texts_part_is_a_near_tie(backend: str) -> None:
    """Every committed token is the argmax of its row. Texts differ only from near-ties on."""
    ids = prompts(6)
    with engine(draft=False, attention_backend=backend) as run:
        expected = together(run, ids)
    with engine(attention_backend=backend) as run:
        margins = Margins(run)
        part_only_at_near_ties(ask(run, ids), margins, expected)


@pytest.mark.parametrize("backend", ["flashinfer", "fa3", "triton"])
def test_requests_join_one_by_one(backend: str) -> None:
    """Eager forwards keep buffers, which grow in decode steps and are filled in prefills."""
    ids, reqs = prompts(5), []
    with engine(attention_backend=backend, disable_cuda_graph=True) as run:
        for prompt in ids:
            reqs.append(run.add(prompt, **N))
            run.step()
            run.step()
        run.run(*reqs)
    assert all(len(req.output_ids) == N["max_new_tokens"] for req in reqs)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("backend", ["flashinfer", "fa3", "triton"])
def test_the_last_block_ends_behind_the_context(backend: str, page: int) -> None:
    """The last verify of an answer that fills the context has rows behind the context."""
    flags: dict[str, Any] = {"attention_backend": backend, "page_size": page, "context_length": 160}
    ids = prompts(5)
    with engine(draft=False, **flags) as run:
        expected = together(run, ids, max_new_tokens=150)
    with engine(**flags) as run:
        margins = Margins(run)
        reqs = ask(run, ids, max_new_tokens=150)
    assert all(len(req.origin_input_ids) + len(req.output_ids) > 150 for req in reqs)
    part_only_at_near_ties(reqs, margins, expected)


@pytest.mark.skipif(DRY_RUN, reason="nothing to compile for")
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_context_kv_kernel(dtype: torch.dtype, dim: int) -> None:
    """The compiled kernel against its reference."""
    torch.manual_seed(0)
    n, layers, heads, size = 300, 5, 8, 4096
    kv = torch.randn(n, layers, 2, heads, dim, device="cuda").to(dtype)
    weight = torch.rand(layers, dim, device="cuda").to(dtype)
    cos_sin, slots = (
        torch.randn(n, 1, dim, device="cuda"),
        1 + torch.randperm(size - 1, device="cuda")[:n],
    )
    slots[::7] = 0  # not written
    written = []
    for store in (store_kv.store_kv_in_torch, store_kv.launch_store_kv):
        pools = [
            [torch.zeros(size, heads, dim, dtype=dtype, device="cuda") for _ in range(layers)]
            for _ in "kv"
        ]
        store(kv, weight, 1e-6, cos_sin, slots, store_kv.Pools.of(*pools))
        written.append(torch.stack([*pools[0], *pools[1]])[:, 1:])
    unit = torch.finfo(dtype).eps * written[0].abs().max().item()
    torch.testing.assert_close(*written, rtol=0, atol=2 * unit)


@pytest.mark.skipif(DRY_RUN, reason="nothing to compile for")
@pytest.mark.parametrize("given", [True, False])
def test_kernels_of_a_step(given: bool) -> None:
    """The compiled kernels of acceptance and of the next block equal their references."""
    torch.manual_seed(0)
    rows, width = 48, 16
    drawn, block = torch.randint(3, (2, rows, width), device="cuda")
    block[::2, 1:] = drawn[::2, :-1]
    count = torch.randint(width, (rows,), device="cuda") if given else None
    lens = torch.randint(90, (rows,), device="cuda")
    slots = torch.randint(1, 99, (rows, 20), device="cuda")[:, :width]
    widths = torch.randint(1, width + 1, (rows,), device="cuda") if given else None
    asked = block, drawn, slots, lens, 80, count, widths
    for ours, reference in zip(launch_accept(*asked), accept_in_torch(*asked), strict=True):
        assert torch.equal(ours, reference)
    table = torch.randint(1000, (rows, 128), dtype=torch.int32, device="cuda")
    behind = drawn[:, 0].contiguous(), lens, torch.randperm(rows, device="cuda"), table, width, 150
    for ours, reference in zip(
        launch_next_block(*behind), next_block_in_torch(*behind), strict=True
    ):
        assert torch.equal(ours, reference)


@pytest.mark.skipif(DRY_RUN, reason="nothing to compile for")
@pytest.mark.parametrize("rows", [1, 16, 720])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernel_of_the_largest_logit(rows: int, dtype: torch.dtype) -> None:
    """The compiled kernel equals torch's own functions."""
    torch.manual_seed(rows)
    logits = torch.randn(rows, 152_064, device="cuda").to(dtype)[:, :151_936]
    best = logits.argmax(dim=-1, keepdim=True)
    value = logits.gather(1, best).float()
    for return_probs in (False, True):
        ours = launch_largest(logits, return_probs)
        assert torch.equal(ours[0], best)
        assert torch.equal(ours[1], value)
        if return_probs:
            sum_exp = (logits.float() - value).exp().sum(dim=-1, keepdim=True)
            torch.testing.assert_close(ours[2], sum_exp, rtol=1e-4, atol=0)


@pytest.mark.skipif(DRY_RUN, reason="nothing to compile for")
@pytest.mark.parametrize("rows", [1, 17, 48])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernel_of_the_largest_biased_logit(rows: int, dtype: torch.dtype) -> None:
    """Whole numbers, so that every order of sums is exact. Tokens are apart, as in a block."""
    torch.manual_seed(rows)
    options: Any = {"device": "cuda", "dtype": torch.int8}
    logits = torch.randint(-9, 9, (rows, 7, 152_064), **options).to(dtype)[:, 3, :151_936]
    latent = torch.randint(-1, 2, (rows, 256), **options).to(dtype)
    weight = torch.randint(-1, 2, (256, 151_936), **options).to(dtype).T
    biased = logits.float() + latent.float() @ weight.float().T
    value = biased.amax(dim=-1, keepdim=True)
    first = (biased == value).float().argmax(dim=-1, keepdim=True)
    for return_probs in (False, True):
        ours = launch_biased_largest(logits, latent, weight, return_probs)
        assert torch.equal(ours[0], first)
        assert torch.equal(ours[1], value)
        if return_probs:
            sum_exp = (biased - value).exp().sum(dim=-1, keepdim=True)
            torch.testing.assert_close(ours[2], sum_exp, rtol=1e-4, atol=0)


@pytest.mark.skipif(DRY_RUN, reason="nothing to compile for")
def test_noise_and_draws() -> None:
    """The compiled kernels equal their references, but for near-ties of float32."""
    torch.manual_seed(5)
    size, requests, drafts = 151_936, 8, 15
    table = NoiseTable.empty(20, "cuda")
    table.seeds.random_(-(2**62), 2**62)
    table.temperatures.uniform_(0.3, 1.2)[::4] = 0
    rows, positions = torch.randperm(20, device="cuda")[:requests], torch.arange(900, 908).cuda()
    noise = DraftNoise.after(table, rows, positions, torch.arange(size, device="cuda").int())
    logits = 3 * torch.randn(requests * drafts, size, device="cuda").bfloat16()
    numbers = launch_gumbel(
        noise, torch.arange(900, device="cuda").view(1, 1, -1).expand(8, 3, -1).contiguous()
    )
    reference = noise.gumbel(3, torch.arange(900, device="cuda"))
    torch.testing.assert_close(numbers, reference, rtol=1e-5, atol=2e-5)
    for return_probs in (False, True):
        ours = launch_largest(logits, return_probs, noise)
        wanted = largest_in_torch(logits, return_probs, noise)
        torch.testing.assert_close(ours.value, wanted.value, rtol=1e-5, atol=1e-4)
        assert (ours.argmax == wanted.argmax).float().mean() > 0.99
    sampling = Sampling(
        torch.full((requests,), 0.7, device="cuda"),
        torch.tensor([1, 2**30, 20, 2**30, 2**30, 5, 50, 300], device="cuda").int(),
        torch.tensor([1.0, 1.0, 0.95, 0.7, 1.0, 0.8, 1.0, 0.95], device="cuda"),
        torch.tensor([0.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.0], device="cuda"),
        rows,
        table.seeds,
        True,
    )
    asked = logits, sampling, torch.arange(requests * drafts, device="cuda"), None
    assert (launch_draw(*asked) == draw_in_torch(*asked)).float().mean() > 0.98


@pytest.mark.skipif(DRY_RUN, reason="nothing to compile for")
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])  # SGLang's graphs use int32
def test_kernel_of_tables(page: int, kind: torch.dtype) -> None:
    torch.manual_seed(page)
    table = torch.randint(10_000, (50, 4096), dtype=torch.int32, device="cuda") * 16
    rows, lens = torch.randperm(50, device="cuda")[:40], torch.randint(4080, (40,), device="cuda")
    lens = lens.to(kind)
    filled, pages = rows.int(), torch.full_like(table[:40, : 4096 // page], -1)
    fill_tables(table, rows, lens, 16, page, filled, pages)
    assert torch.equal(filled, (lens + 16).int())
    held = torch.arange(pages.shape[1], device="cuda") * page < filled[:, None]
    expected = torch.where(held, table[rows, ::page] // page, -1)
    assert torch.equal(pages, expected)
