"""Targets with latent attention (MLA): other kernels verify their blocks.

FlashAttention 3 compares a second query with the latent vectors. FlashInfer has its own module.
Triton's kernel reads K and V from the same vectors. Some prefills compute K and V of each head.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sglang_dflash.settings.options import DRAFT_AHEAD, VERIFY_WIDTH
from test.checkpoints import LAYERS, prompt, write_draft
from test.rehearsal.device import attention
from test.rehearsal.mutation import Change, mutate
from test.rehearsal.serving import (
    SHARED,
    Asked,
    N,
    answer,
    assert_drafts,
    once_each,
    served,
    small_draft,
)
from test.targets import TARGETS, write

pytestmark = pytest.mark.ci

KIND = "DeepseekV3ForCausalLM"
DENSE = {"first_k_dense_replace": LAYERS, "kv_lora_rank": 64, "qk_nope_head_dim": 32}
DENSE |= {"v_head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
FEW = N | {"max_new_tokens": 10}
BACKENDS = ["fa3", "flashinfer", "triton"]
DRAFT = {"num_target_layers": LAYERS, "dflash_config": {"target_layer_ids": [0, 2]}}
FULL = pytest.mark.full


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latent")
    with pytest.MonkeyPatch.context() as changed:
        changed.setitem(TARGETS, KIND, TARGETS[KIND] | DENSE)
        write(folder / "target", KIND)
    write_draft(folder / "draft", *small_draft(**DRAFT))
    return folder


@pytest.fixture(scope="module")
def asked(pair: Path) -> dict[str, Asked]:
    """Requests and their answers without speculation, which are those of Transformers' model."""
    asked = {
        "greedy": Asked(SHARED, FEW),
        "one token": Asked(prompt(981, 1), FEW),
        "logprobs": Asked(prompt(982, 20), FEW | {"return_logprob": True}),
        "radix": Asked(SHARED + prompt(983, 5), FEW),
    }
    assert_right(pair, answer(pair, asked))
    return asked


def assert_right(pair: Path, asked: dict[str, Asked]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(pair / "target").float().eval()
    for one in asked.values():
        whole = torch.tensor([one.ids + one.answer["ids"]])
        with torch.no_grad():
            said = model(whole).logits[0, len(one.ids) - 1 : -1].argmax(dim=-1)
        assert said.tolist() == one.answer["ids"]


def cases() -> list[Any]:
    """Backend, page size, draft-ahead and graphs. One of them runs by default."""
    crossed = product(BACKENDS, [16, 1], ["on", "off"], [True, False])
    return [
        pytest.param(*case, marks=() if case == ("fa3", 16, "on", True) else FULL)
        for case in crossed
    ]


@pytest.mark.parametrize(("backend", "page", "ahead", "graphs"), cases())
def test_answers_and_drafts(
    pair: Path,
    asked: dict[str, Asked],
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    page: int,
    ahead: str,
    graphs: bool,
) -> None:
    """Batches of one to three requests run in graphs of two and four. A prefix is cached."""
    monkeypatch.setenv(DRAFT_AHEAD, ahead)
    flags: dict[str, Any] = {"page_size": page, "disable_cuda_graph": not graphs}
    reqs, drafts = served(pair, asked, backend, **flags)
    assert reqs["radix"].cached_tokens >= 32
    assert_drafts(pair, reqs, drafts, small_draft(**DRAFT))


@pytest.mark.parametrize(
    ("width", "backend"), once_each(["auto", "5"], ["fa3", "triton", "flashinfer"])
)
def test_widths(
    pair: Path, asked: dict[str, Asked], monkeypatch: pytest.MonkeyPatch, backend: str, width: str
) -> None:
    """FlashInfer verifies as many rows of each request."""
    monkeypatch.setenv(VERIFY_WIDTH, width)
    served(pair, asked, backend, any_rows=width == "auto")


@pytest.mark.full
@pytest.mark.parametrize(
    ("prefill", "decode"), [("fa3", "triton"), ("flashinfer", "fa3"), ("triton", "flashinfer")]
)
@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_two_backends(
    pair: Path, asked: dict[str, Asked], prefill: str, decode: str, mode: str
) -> None:
    """Either one verifies. The draft uses the decode backend."""
    flags: dict[str, Any] = {
        "prefill_attention_backend": prefill,
        "decode_attention_backend": decode,
        "speculative_attention_mode": mode,
    }
    served(pair, asked, None, **flags)


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_context_ends_inside_a_block(pair: Path, backend: str) -> None:
    asked = answer(pair, {"long": Asked(prompt(950, 20), N | {"max_new_tokens": 74})})
    served(pair, asked, backend, page_size=16, context_length=96)


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
def test_chunks(pair: Path, asked: dict[str, Asked], backend: str) -> None:
    """Prefills behind a prefix read the latent vectors, like verifies."""
    served(pair, asked, backend, page_size=16, chunked_prefill_size=16)


PLAN = "step.forward:VerifyInput.generate_attn_arg_prefill"
MUTATIONS: list[tuple[str, Change]] = [
    (
        "fa3",
        ("backends.fa3:begin_forward", "forward_batch.seq_lens,", "forward_batch.seq_lens-1,"),
    ),
    ("fa3", ("backends.fa3:begin_forward", "backend.page_size,", "1,")),
    ("flashinfer", (PLAN, "(paged_kernel_lens + width)", "(paged_kernel_lens + 1)")),
    ("flashinfer", (PLAN, "(requests + 1) * width, width", "requests + 1, 1")),
    ("triton", ("step.forward:VerifyInput.forward_batch", "=seq_lens,", "=seq_lens + 1,")),
]


@pytest.mark.full
@pytest.mark.parametrize(("backend", "change"), MUTATIONS, ids=str)
def test_mutations_are_seen(
    pair: Path,
    asked: dict[str, Asked],
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    change: Change,
) -> None:
    mutate(monkeypatch, *change)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        served(pair, asked, backend, page_size=16)


@pytest.mark.full
def test_features_of_another_layer_are_seen(pair: Path, asked: dict[str, Asked]) -> None:
    reqs, drafts = served(pair, asked, "fa3")
    other = DRAFT | {"dflash_config": {"target_layer_ids": [0, 1]}}
    with pytest.raises(AssertionError):
        assert_drafts(pair, reqs, drafts, small_draft(**other))


@pytest.mark.full
def test_a_verify_that_sees_the_whole_block_is_seen(
    pair: Path, asked: dict[str, Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutation of FlashInfer's kernel: no mask."""
    attend = attention.attend

    def without_mask(*given: Any) -> Any:
        q, k, v, scale, _, left, softcap = given
        return attend(q, k, v, scale, len(q) > 8, left, softcap)

    monkeypatch.setattr(attention, "attend", without_mask)
    with pytest.raises(AssertionError):
        served(pair, asked, "flashinfer")
