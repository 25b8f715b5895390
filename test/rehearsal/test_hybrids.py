"""Hybrid targets: SGLang's GDN kernels and graphs, with the states of the committed tokens.

Its kernels take seconds for a prefill in Triton's interpreter, so prompts and answers are short.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.mamba.causal_conv1d_triton import causal_conv1d_update
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from torch import Tensor

from sglang_dflash.cpu.v0_5_13.gated_delta_net import TorchGatedDeltaNet
from sglang_dflash.method.block import Block
from sglang_dflash.settings.options import VERIFY_WIDTH
from sglang_dflash.step.forward import VerifyInput
from sglang_dflash.targets.recurrent_states import RecurrentStates
from sglang_dflash.targets.replay_states import (
    BlockInputs,
    Copies,
    Layer,
    States,
    Weights,
    causal_conv,
    launch_replay_states,
    replay_states_in_torch,
)
from test.checkpoints import prompt
from test.rehearsal.device import kernels
from test.rehearsal.device.memory import CUDA
from test.rehearsal.mutation import Change, mutate
from test.rehearsal.serving import (
    AT_INTERVALS,
    Asked,
    answer,
    assert_exact,
    engine,
    serve,
    write_hybrid_pair,
)

pytestmark = pytest.mark.ci

BACKENDS = ["fa3", "flashinfer", "triton"]
N = {"max_new_tokens": 8, "ignore_eos": True}
REPLAY = "sglang_dflash.targets.replay_states:_replay"
UPDATE = (
    "srt.layers.attention.fla.fused_sigmoid_gating_recurrent"
    ":fused_sigmoid_gating_delta_rule_update_kernel"
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid_pair(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def asked(pair: Path) -> dict[str, Asked]:
    """Requests whose last one joins a batch with a prompt of one token."""
    lengths = [1, 20, 9]
    return answer(pair, {str(i): Asked(prompt(960 + i, n), N) for i, n in enumerate(lengths)})


def check(pair: Path, asked: dict[str, Asked], backend: str | None = "fa3", **flags: Any) -> None:
    """Each batch runs in a graph of four, whose other rows hold values of the last batch."""
    usual: dict[str, Any] = {"cuda_graph_bs": [4], "disable_radix_cache": True}
    with engine(pair, backend, **usual | flags) as run:
        reqs = serve(run, asked, apart=1)
    assert_exact(reqs, asked)


@pytest.mark.parametrize(
    "backend", [b if b == "fa3" else pytest.param(b, marks=pytest.mark.full) for b in BACKENDS]
)
def test_padded_batches(pair: Path, asked: dict[str, Asked], backend: str) -> None:
    check(pair, asked, backend)


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page", [1, 16])
def test_eager(pair: Path, asked: dict[str, Asked], backend: str, page: int) -> None:
    check(pair, asked, backend, disable_cuda_graph=True, page_size=page)


@pytest.mark.full
@pytest.mark.parametrize("width", ["5", "auto"])
def test_widths(
    pair: Path, asked: dict[str, Asked], monkeypatch: pytest.MonkeyPatch, width: str
) -> None:
    """States are stored for fewer positions than there is room for."""
    monkeypatch.setenv(VERIFY_WIDTH, width)
    check(pair, asked)


@pytest.mark.full
@pytest.mark.parametrize(
    ("prefill", "decode", "verify"),
    [
        ("fa3", "triton", "prefill"),
        ("flashinfer", "fa3", "prefill"),
        ("triton", "flashinfer", "decode"),
    ],
)
def test_two_backends(
    pair: Path, asked: dict[str, Asked], prefill: str, decode: str, verify: str
) -> None:
    """One attention backend verifies, and the linear attention of both keeps the same states."""
    backends = {"prefill_attention_backend": prefill, "decode_attention_backend": decode}
    check(pair, asked, None, speculative_attention_mode=verify, **backends)


def test_second_turn(pair: Path, asked: dict[str, Asked]) -> None:
    """The radix cache takes over the state of a request that ended inside its accepted drafts."""
    first = asked["1"]
    said = first.answer["ids"]
    short = Asked(first.ids, N | {"max_new_tokens": 3})
    short.answer = first.answer | {"ids": said[:3]}
    later = Asked(first.ids + said[:3], N | {"max_new_tokens": 5})
    later.answer = first.answer | {"ids": said[3:]}
    turns = {"first": short, "later": later}
    with engine(pair, "triton", cuda_graph_bs=[4], max_mamba_cache_size=16) as run:
        reqs = serve(run, turns, apart=9)  # one after the other
    assert [list(req.output_ids) for req in reqs.values()] == [said[:3], said[3:]]
    assert reqs["later"].cached_tokens == len(first.ids) + 2


MUTATIONS: list[Change] = [
    ("targets.hybrid_attention:count_padding", "len(verify_input.block.slots)", "0"),
    (
        "targets.hybrid_attention:begin_in_full_attention",
        "backend.full_",
        "False and backend.full_",
    ),
    (
        "targets.recurrent_states:RecurrentStates.commit",
        "(num_committed,",
        "([1] * len(num_committed),",
    ),
    ("targets.hybrid_attention:verify_block", "states.conv[0][slots]", "states.conv[0][slots] * 0"),
]


@pytest.mark.full
@pytest.mark.parametrize("change", MUTATIONS, ids=lambda change: change[0])
def test_mutations_are_seen(
    pair: Path, asked: dict[str, Asked], monkeypatch: pytest.MonkeyPatch, change: Change
) -> None:
    mutate(monkeypatch, *change)
    with pytest.raises(AssertionError):
        check(pair, asked)


@pytest.mark.full
def test_kernels_compile(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's kernels refuse fp32 on a GPU, so they are compiled for bf16."""
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "bfloat16")
    compiled: dict[str, set[str]] = {}
    monkeypatch.setattr(kernels, "COMPILED", compiled)
    flags = AT_INTERVALS | {"cuda_graph_bs": [2], "max_running_requests": 2}
    with engine(pair, "triton", dtype="bfloat16", **flags) as run:
        run.generate(prompt(1, 6), max_new_tokens=8, ignore_eos=True)  # 6 to 13 tokens
    assert {REPLAY, UPDATE} <= compiled.keys()


def test_torch_equals_the_kernels(pair: Path) -> None:
    """The CPU's linear attention and SGLang's, for a verify and the replay of what it read."""
    with engine(pair, "triton", disable_cuda_graph=True, disable_radix_cache=True) as run:
        runner = run.worker.model_runner
        layers = [m for m in runner.model.modules() if isinstance(m, RadixLinearAttention)]
        pool = runner.req_to_token_pool
        pool.req_index_to_mamba_index_mapping[:4] = torch.tensor([0, 3, 1, 2]).int().cuda()
        requests, width = 3, 8
        tokens = requests * width
        drawn = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=drawn).to(CUDA)

        cache = pool.mamba_pool.mamba_cache
        states = draw(*cache.conv[0].shape), draw(*cache.temporal.shape)
        channels, heads = cache.conv[0].shape[2], layers[0].num_v_heads
        given = [(draw(tokens, channels), draw(tokens, heads), draw(tokens, heads)) for _ in layers]
        dummy = torch.zeros(requests, width, dtype=torch.int64, device=CUDA)
        lens = torch.full((requests,), 5)
        rows = torch.arange(1, 4, device=CUDA)
        batch = VerifyInput(Block(dummy, dummy, dummy)).forward_batch(rows, lens.cuda(), lens)
        found = []
        replays = launch_replay_states, replay_states_in_torch
        backends = runner.attn_backend.linear_attn_backend, TorchGatedDeltaNet(runner)
        for backend, replay in zip(backends, replays, strict=True):
            cache.conv[0].copy_(states[0])
            cache.temporal.copy_(states[1])
            backend.init_forward_metadata(batch)
            read = []
            with torch.no_grad():
                for layer, (qkv, a, b) in zip(layers, given, strict=True):
                    inputs = qkv.clone(), a.clone(), b.clone()
                    read.append(backend.forward_extend(layer, batch, *inputs))
                RecurrentStates(runner, replay).commit(rows, [1, 5, width], [0, 0, 0])
            kept = [cache.conv[0][:, 1:4], cache.temporal[:, 1:4]]
            found.append([tensor.cpu().clone() for tensor in (*read, *kept)])
    for theirs, ours in zip(*found, strict=True):
        assert theirs.abs().max() > 1e-3
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_replay_equals_its_reference(dtype: torch.dtype) -> None:
    """Sizes that are no powers of two, layers apart in memory, and unequal numbers of tokens."""
    drawn = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=drawn).to(CUDA, dtype)

    layers, heads, key_heads, keys, values = 3, 4, 2, 12, 40
    channels, positions, window = 2 * key_heads * keys + heads * values, 5, 3
    weights = [
        Layer(
            draw(channels, window + 1),
            draw(heads, dtype=torch.float32),
            draw(heads),
            key_heads,
        )
        for _ in range(layers)
    ]
    start = draw(layers, 6, channels, window), draw(layers, 6, heads, values, keys).float()
    inputs = BlockInputs.zeros(States(*start), 4, positions)
    for part in inputs.tensors():
        part.copy_(draw(*part.shape))
    slots = torch.tensor([4, 1, 2], device=CUDA).int()
    num_committed = torch.tensor([5, 1, 3], device=CUDA)
    copies = Copies(torch.tensor([3, 5, 5], device=CUDA), torch.tensor([2, 0, 3], device=CUDA))
    kept = []
    for replay in (launch_replay_states, replay_states_in_torch):
        states = States(*(part.clone() for part in start))
        replay(states, inputs, Weights(weights), slots, num_committed, copies)
        kept.append([part.cpu() for part in (states.windows, states.matrices)])
    assert torch.equal(kept[0][0], kept[1][0])
    # A value of bfloat16 may be rounded to its neighbour: 2**-4 for values of up to 16.
    bound = 1e-5 if dtype == torch.float32 else 2**-4
    torch.testing.assert_close(kept[0][1], kept[1][1], rtol=0, atol=bound)
    changed = (kept[0][1] != start[1].cpu()).flatten(2).any(2)
    assert changed.nonzero()[:, 1].unique().tolist() == [1, 2, 3, 4, 5]
    windows, matrices = kept[0]
    assert torch.equal(windows[:, 5], windows[:, 2])  # its copy is of all its tokens
    assert torch.equal(matrices[:, 5], matrices[:, 2])
    short = States(*(part.clone() for part in start))
    two = torch.full_like(num_committed, 2)  # as many as are behind the first copy
    launch_replay_states(short, inputs, Weights(weights), slots, two, None)
    assert torch.equal(windows[:, 3], short.windows[:, 4].cpu())
    assert torch.equal(matrices[:, 3], short.matrices[:, 4].cpu())


def test_the_convolution_is_the_one_of_a_verify() -> None:
    """SGLang's kernel rounds each product. The interpreter does so in float16, not in bfloat16."""
    drawn = torch.Generator().manual_seed(0)
    window, tokens = (torch.randn(n, 40, generator=drawn).half() for n in (3, 9))
    weight = torch.randn(40, 4, generator=drawn).half()
    theirs = causal_conv1d_update(
        tokens.T.contiguous()[None].to(CUDA),
        window.T.contiguous()[None].to(CUDA),
        weight.to(CUDA),
        activation="silu",
        conv_state_indices=torch.zeros(1, dtype=torch.int32, device=CUDA),
    )
    ours = causal_conv(torch.cat([window, tokens]), weight)
    different = (ours != theirs.cpu()[0].T).float().mean()
    assert different < 0.02  # by the last bit of SiLU
