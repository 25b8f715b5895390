"""The bounds of `test/precision.py` against fp64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, Qwen3ForCausalLM

from sglang_dflash.tiny import TARGET
from sglang_dflash.tiny.prompts import held_out
from test.precision import FP32_KV, HIDDEN_STATE_BOUND
from test.servers import chat

MARGIN = 10


@pytest.fixture(scope="module")
def texts() -> list[Tensor]:
    """Token ids of questions with their answers, and of Python source: [1, n]."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    said = [chat(e.prompt) + e.answer for kind in ("word", "json") for e in held_out(kind, 2)]
    said += [e.prompt for e in held_out("code", 2)]
    return [tokenizer(text, return_tensors="pt").input_ids[:, :160] for text in said]


@pytest.fixture(scope="module")
def models() -> Iterator[tuple[Qwen3ForCausalLM, Qwen3ForCausalLM]]:
    """The bundled target in fp32 and in fp64."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    load = Qwen3ForCausalLM.from_pretrained
    yield load(TARGET, dtype=torch.float32).eval(), load(TARGET, dtype=torch.float64).eval()
    torch.set_num_threads(before)


@torch.no_grad()
def forwards(model: Qwen3ForCausalLM, ids: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Logits and last hidden states of all positions in fp64, by forwards of `rows` positions."""
    cache, logits, states = None, [], []
    for part in ids.split(rows, dim=1):
        output = model(part, past_key_values=cache, use_cache=True, output_hidden_states=True)
        cache = output.past_key_values
        logits.append(output.logits[0].double())
        states.append(output.hidden_states[-1][0].double())
    return torch.cat(logits), torch.cat(states)


@pytest.mark.ci
@pytest.mark.parametrize("rows", [1, 4, 16, 1000])
def test_bounds_are_ten_times_the_rounding(
    models: tuple[Qwen3ForCausalLM, Qwen3ForCausalLM], texts: list[Tensor], rows: int
) -> None:
    """Of any token at any position, the likely ones and the unlikely ones."""
    single, double = models
    for ids in texts:
        expected, expected_states = forwards(double, ids, 1000)
        logits, states = forwards(single, ids, rows)
        assert MARGIN * (states - expected_states).abs().max() < HIDDEN_STATE_BOUND
        for temperature in (0.6, 1.0):
            error = (logits / temperature).log_softmax(-1) - (expected / temperature).log_softmax(
                -1
            )
            assert MARGIN * error.abs().max() < FP32_KV.at(temperature).logprob
