"""Captured forwards on a CPU give the bits of the modules, or they are not captured."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.utils import MultiprocessingSerializer

from sglang_dflash.cpu.graphs import MOST_TOKENS, CpuGraphs, forget
from sglang_dflash.kernels.next_block import block_positions
from sglang_dflash.runtime.block import DFlashBlock
from test.checkpoints import VOCAB
from test.inprocess import InProcess
from test.worker.conftest import without_graphs


@pytest.fixture(scope="module")
def engine(target: str, draft: str) -> Iterator[InProcess]:
    with InProcess(target, draft) as engine:
        yield engine


@pytest.fixture(params=["target", "draft"])
def runner(engine: InProcess, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The model runner of target or draft, whose modules a test may change."""
    worker = engine.worker
    runner = worker.model_runner if request.param == "target" else worker.draft_model_runner
    forward = runner.model.forward
    runner.piecewise_cuda_graph_runner = CpuGraphs(runner)
    yield runner
    runner.model.forward = forward
    without_graphs(engine)


def random_batch(runner: Any, widths: list[int], seed: int) -> ForwardBatch:
    """A block of random tokens per request, behind contexts of random lengths and places."""
    rng, most = random.Random(seed), max(widths)
    lens_cpu = torch.tensor([rng.randrange(1, 40) for _ in widths])
    places = rng.sample(range(1, 4000), 64 * len(widths))
    rows = torch.tensor(places, dtype=torch.int32).view(len(widths), 64)
    runner.req_to_token_pool.req_to_token[: len(widths), :64] = rows
    tokens = torch.tensor([[rng.randrange(VOCAB) for _ in range(most)] for _ in widths])
    positions = block_positions(lens_cpu, most)
    slots = torch.stack(
        [row[n : n + most] for row, n in zip(rows.long(), lens_cpu.tolist(), strict=True)]
    )
    block = DFlashBlock(tokens, positions, slots).cut(np.array(widths))
    if runner.is_draft_worker:
        block.capture_hidden_mode = CaptureHiddenMode.NULL
    return block.forward_batch(torch.arange(len(widths)), lens_cpu.clone(), lens_cpu)


@torch.inference_mode()
def outputs(runner: Any, batch: ForwardBatch, graphs: CpuGraphs | None) -> dict[str, torch.Tensor]:
    runner.piecewise_cuda_graph_runner = graphs
    found = vars(runner.forward(batch).logits_output)
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def assert_same(runner: Any, graphs: CpuGraphs, widths: list[int], seed: int) -> None:
    expected = outputs(runner, random_batch(runner, widths, seed), None)
    found = outputs(runner, random_batch(runner, widths, seed), graphs)
    assert "hidden_states" in expected
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


def test_the_same_bits(runner: Any) -> None:
    """Whole blocks and cut ones, with several numbers of requests. Each kind is captured once."""
    graphs = runner.piecewise_cuda_graph_runner
    kinds = [[1], [8], [3], [1, 2], [4, 4], [8, 1, 3], [2, 2, 2, 2]]
    if runner.is_draft_worker:  # it reads whole blocks
        kinds = [[8] * len(widths) for widths in kinds]
    for seed, widths in enumerate(kinds * 3):
        assert_same(runner, graphs, widths, seed)
    assert len(graphs._graphs) == len({sum(widths) for widths in kinds})


def test_many_tokens_run_in_modules(runner: Any) -> None:
    graphs = runner.piecewise_cuda_graph_runner
    batch = random_batch(runner, [8] * (MOST_TOKENS // 8) + [1], 0)
    assert not graphs.can_run(batch)
    batch = random_batch(runner, [8] * (MOST_TOKENS // 8), 0)
    assert graphs.can_run(batch)


def test_only_blocks_are_captured(engine: InProcess, runner: Any) -> None:
    graphs = runner.piecewise_cuda_graph_runner
    before = dict(graphs._graphs)
    engine.generate(list(range(5, 25)), max_new_tokens=1)  # a prefill, and nothing else
    assert graphs._graphs == before


@torch.jit.script
def unseen(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1)


@pytest.mark.parametrize(
    "runner", ["target", pytest.param("draft", marks=pytest.mark.ci)], indirect=True
)
@pytest.mark.parametrize(
    ("adds", "reason"),
    [
        (lambda hidden, batch: int(hidden.sum()) % 7, "__int__` returns int, not a tensor"),
        (lambda hidden, batch: len(hidden.tolist()), "`tolist` returns list, not a tensor"),
        (lambda hidden, batch: len((hidden > 3).nonzero()), "`nonzero` depends on values"),
        (lambda hidden, batch: hidden[hidden > 3].numel(), "`__getitem__` depends on values"),
        (lambda hidden, batch: len(torch.where(hidden > 3)[0]), "`where` depends on values"),
        (lambda hidden, batch: batch.seq_lens.shape[0], "neither the batch nor the model"),
        (lambda hidden, batch: isinstance(batch.spec_info, DFlashBlock), "number of its tokens"),
        (lambda hidden, batch: 5 // batch.batch_size, "unsupported operand"),
        (lambda hidden, batch: batch.positions.add_(1).sum(), "changes the tensors of its batch"),
        (lambda hidden, batch: 1 if batch.batch_size == 1 else 0, "number of its tokens"),
        (lambda hidden, batch: batch.spec_info.draft_token_num, "number of its tokens"),
        (lambda hidden, batch: batch.seq_lens_sum + 1, "unsupported operand"),
        (lambda hidden, batch: torch.full((), batch.batch_size), "number of its tokens"),
        (lambda hidden, batch: torch.tensor(batch.batch_size), "number of its tokens"),
        (lambda hidden, batch: batch.seq_lens.sum(), "neither the batch nor the model"),
        (lambda hidden, batch: ELSEWHERE, "neither the batch nor the model"),
        (lambda hidden, batch: unseen(hidden) * 0, "its replay gave other"),
    ],
)
def test_what_a_replay_could_not_repeat_is_not_captured(
    runner: Any,
    caplog: pytest.LogCaptureFixture,
    adds: Callable[[torch.Tensor, Any], Any],
    reason: str,
) -> None:
    """The forward runs in its modules, and one line says why."""
    caplog.set_level(logging.INFO, logger="sglang_dflash")
    forward = runner.model.forward

    def changed(input_ids: Any, positions: Any, batch: Any, **others: Any) -> Any:
        output = forward(input_ids, positions, batch, **others)
        output.hidden_states = output.hidden_states + adds(output.hidden_states, batch)
        return output

    runner.model.forward = changed
    graphs = runner.piecewise_cuda_graph_runner
    for seed in range(3):
        assert_same(runner, graphs, [8], seed)
    assert not graphs._graphs
    assert not graphs.can_run(random_batch(runner, [8], 9))
    (said,) = [text for text in caplog.messages if "CPU graphs" in text]
    assert reason in said


ELSEWHERE: torch.Tensor = torch.ones(())


def test_an_output_of_more_fields_is_not_captured(runner: Any) -> None:
    forward = runner.model.forward

    def more(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.more = 1
        return output

    runner.model.forward = more
    for seed in range(2):
        batch = random_batch(runner, [8], seed)
        assert outputs(runner, batch, runner.piecewise_cuda_graph_runner)
    assert not runner.piecewise_cuda_graph_runner._graphs


def test_a_batch_in_disguise_is_not_captured(
    engine: InProcess, runner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A graph would always use the copy of the first batch that the model made in its capture."""
    caplog.set_level(logging.INFO, logger="sglang_dflash")
    forward = runner.model.forward
    runner.model.forward = lambda ids, positions, batch, **others: forward(
        ids, positions, copy.copy(batch), **others
    )
    for seed in range(3):
        assert_same(runner, runner.piecewise_cuda_graph_runner, [8], seed)
    (said,) = [text for text in caplog.messages if "CPU graphs" in text]
    assert "ForwardBatch" in said


def test_a_hooked_model_is_not_captured(engine: InProcess, runner: Any) -> None:
    """A model that runs modules of the hooked model is not captured either."""
    target = engine.worker.model_runner
    for model in {runner.model, target.model}:
        hook = next(model.children()).register_forward_hook(lambda *_: None)
        try:
            assert not CpuGraphs(runner).can_run(random_batch(runner, [8], 0))
        finally:
            hook.remove()


def test_a_failing_forward_fails_as_it_does(runner: Any) -> None:
    """The error is that of the forward, not one of its capture."""

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("of the model")

    runner.model.forward = fails
    with pytest.raises(RuntimeError, match="of the model"):
        outputs(runner, random_batch(runner, [8], 0), runner.piecewise_cuda_graph_runner)


def load_doubled(model: torch.nn.Module, tensors: list[tuple[str, torch.Tensor]]) -> None:
    model.load_weights([(name, tensor * 2) for name, tensor in tensors])  # type: ignore[operator]


def test_new_weights_drop_the_graphs(engine: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of the draft, because it runs the target's embedding and LM head.

    The second time a loader of the user's own reads them (--custom-weight-loader).
    """
    loader = f"{__name__}.load_doubled"
    monkeypatch.setattr(engine.scheduler.server_args, "custom_weight_loader", [loader])
    target, draft = engine.worker.model_runner, engine.worker.draft_model_runner
    both = {}
    for runner in (target, draft):
        both[runner] = runner.piecewise_cuda_graph_runner = CpuGraphs(runner)
    weight = target.model.get_parameter("model.embed_tokens.weight")
    changed = weight.detach()[:VOCAB] * 2
    named = [("model.embed_tokens.weight", changed)]
    twice = [MultiprocessingSerializer.serialize(named) for _ in range(2)]  # read once each
    for load_format, factor, tensors in zip((None, loader), (1, 2), twice, strict=True):
        for runner, graphs in both.items():
            assert_same(runner, graphs, [8], 0)
            assert graphs._graphs
        request = UpdateWeightsFromTensorReqInput([tensors], load_format=load_format)
        assert engine.scheduler.weight_updater.update_weights_from_tensor(request).success
        assert torch.equal(weight[:VOCAB], changed * factor)
        assert engine.worker.update_weights_from_ipc(None)[0]  # SGLang itself updates the target
        for runner, graphs in both.items():
            assert not graphs._graphs
            assert_same(runner, graphs, [8], 1)
    with torch.no_grad():
        weight.div_(4)
    without_graphs(engine)


def test_replaced_weights(runner: Any) -> None:
    """A loader may put other tensors in the place of the old ones."""
    graphs = runner.piecewise_cuda_graph_runner
    assert_same(runner, graphs, [8], 0)
    norm = runner.model.norm if runner.is_draft_worker else runner.model.model.norm
    old, norm.weight = norm.weight, torch.nn.Parameter(norm.weight * 1.5, requires_grad=False)
    forget(None, runner)
    assert_same(runner, graphs, [8], 1)
    assert graphs._graphs
    norm.weight = old
    forget(None, runner)
