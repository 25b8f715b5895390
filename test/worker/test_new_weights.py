"""New weights of the target: DFLASH answers with them, and the draft keeps its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
from sglang.srt.utils import MultiprocessingSerializer

from test.checkpoints import HIDDEN, VOCAB, prompt
from test.inprocess import InProcess

NAME = "model.embed_tokens.weight"


def load_reversed(model: Any, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """A loader of a user's own."""
    model.load_weights([(name, tensor.flip(0)) for name, tensor in tensors])


LOADER = f"{__name__}.{load_reversed.__name__}"


@pytest.fixture(scope="module")
def tensors() -> Iterator[str]:
    """New weights, serialised once for each update: they are read once.

    After an update, SGLang serialises tensors of CUDA only.
    """
    torch.manual_seed(82)
    named = [(NAME, torch.randn(VOCAB, HIDDEN))]
    return iter([MultiprocessingSerializer.serialize(named) for _ in range(4)])


@pytest.mark.parametrize("load_format", [None, LOADER], ids=["sglang", "custom loader"])
def test_new_weights_from_tensors(
    target: str, draft: str, tensors: Iterator[str], load_format: str | None
) -> None:
    """As on a server without speculation, also with --custom-weight-loader."""

    def answers(draft: str | None) -> list[list[int]]:
        with InProcess(target, draft, custom_weight_loader=[LOADER]) as engine:
            before = engine.generate(prompt(81, 20), max_new_tokens=30)
            request = UpdateWeightsFromTensorReqInput([next(tensors)], load_format=load_format)
            assert engine.scheduler.weight_updater.update_weights_from_tensor(request).success
            return [before, engine.generate(prompt(81, 20), max_new_tokens=30)]

    before, after = answers(draft)
    assert before != after
    assert [before, after] == answers(None)


@pytest.mark.parametrize("tokens", [1, 12])
def test_the_cache_is_flushed_right_after_an_answer(target: str, draft: str, tokens: int) -> None:
    """Its request is still in the batch then, after a prefill or after a decode step."""
    with InProcess(target, draft) as engine:
        req = engine.add(prompt(83, 20), max_new_tokens=tokens, ignore_eos=True)
        while not req.finished():
            assert not engine.scheduler.flush_cache()
            engine.step()
        assert engine.scheduler.flush_cache()
        assert engine.generate(prompt(83, 20), max_new_tokens=12)
