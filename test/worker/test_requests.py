"""Rules of requests in process: what `sglang.Engine` passes, and checks of HTTP bodies."""

from __future__ import annotations

import asyncio
import json
from inspect import signature
from types import SimpleNamespace
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.io_struct import GenerateReqInput, SessionParams
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.errors import Refusal
from sglang_dflash_guard import body
from sglang_dflash_guard.body import check_request
from sglang_dflash_guard.control import check_control
from sglang_dflash_guard.middleware import DEEPEST, HALF, deeper, refuse_unwritable

MANAGER = SimpleNamespace(
    is_generation=True,
    server_args=SimpleNamespace(
        speculative_algorithm="DFLASH",
        disaggregation_mode="null",
        enable_metrics=True,
        tokenizer_metrics_allowed_custom_labels=["team"],
    ),
    model_config=SimpleNamespace(vocab_size=2048, hidden_size=4, dtype=torch.bfloat16),
)


def read(**fields: Any) -> GenerateReqInput:
    request = GenerateReqInput(**fields)
    check_request(MANAGER, request)
    return request


# Fields of SGLang 0.5.23. `read_object` and `_read_fields` ask whether this release has them.
LATER = {
    *("session_id", "cache_salt", "return_sampling_mask", "sampling_logprobs_mode"),
    *("return_flat_raw_top_logprobs", "return_flat_raw_output_top_logprobs"),
    *("return_flat_raw_top_logprobs_b64", "max_thinking_tokens", "token_indices_to_pool"),
    *("video_config", "images_config", "mm_processor_kwargs"),
}
LATER_SAMPLING = {"beam_width", "watermark", "ebnf_full_assistant"}


def test_every_field_has_a_type() -> None:
    """SGLang's own fields, each once."""
    theirs = {*get_type_hints(GenerateReqInput), *LATER}
    media = ["image_data", "video_data", "audio_data", "modalities", "mm_hashes"]  # unchecked
    ours = [*body.Request.model_fields, *body.Prompts.model_fields, *body.OWN]
    assert sorted([*ours, *media, "sampling_params", "session_params"]) == sorted(theirs)
    sampling = {*signature(SamplingParams).parameters, *LATER_SAMPLING}
    assert set(body.Sampling.model_fields) == sampling
    assert set(body.Session.model_fields) == set(get_type_hints(SessionParams))


def test_values_of_numpy_become_plain() -> None:
    params = {"temperature": np.float32(0.5), "max_new_tokens": np.int64(3)}
    request = read(input_ids=np.array([1, 2]), sampling_params=params)
    assert request.input_ids == [1, 2]
    assert request.sampling_params == {"temperature": 0.5, "max_new_tokens": 3}
    assert type(request.sampling_params["max_new_tokens"]) is int


def test_a_tokenizers_result_is_a_prompt() -> None:
    """Ollama's chat passes what Transformers' `apply_chat_template` returns."""
    assert read(input_ids={"input_ids": [1, 2], "attention_mask": [1, 1]}).input_ids == [1, 2]


def test_custom_params_are_free() -> None:
    kept: dict[Any, Any] = {"f": print, 1: object(), "nan": float("nan")}
    assert read(text="x", sampling_params={"custom_params": kept}).sampling_params == {
        "custom_params": kept
    }


def test_biases_stay_finite() -> None:
    bias = {"5": float("-inf"), 6: 1e308, 7: 2}
    read_bias = read(text="x", sampling_params={"logit_bias": bias}).sampling_params["logit_bias"]
    assert read_bias == {"5": -1e30, "6": 1e30, "7": 2.0}


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("input_embeds", {"input_embeds": [[0.5, 0.5]]}),
        ("input_embeds", {"input_embeds": [[[0.5] * 4], [[0.5] * 3]]}),
        ("custom_labels", {"text": "x", "custom_labels": {"other": "x"}}),
        ("modalities", {"text": "x", "sampling_params": {"n": 2}, "modalities": ["image"]}),
        ("lora_path", {"text": "x", "sampling_params": {"n": 2}, "lora_path": ["a", "b"]}),
        ("text and input_ids", {"text": "x", "input_ids": [[1]]}),
        ("prompt", {}),
    ],
)
def test_refused(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=field):
        read(**fields)


def test_depth_counts_no_brackets_in_text() -> None:
    nested: Any = 1
    for _ in range(DEEPEST):
        nested = [nested]
    assert not deeper(json.dumps(nested).encode(), DEEPEST)
    assert deeper(json.dumps([nested]).encode(), DEEPEST)
    assert not deeper(json.dumps(["[" * 999, '\\"[', [1]] * 999).encode(), DEEPEST)


@pytest.mark.parametrize("text", ["\ud800", "a\udc00", "\ud83dx", "\udc00\ud800"])
def test_half_of_a_surrogate_pair_is_found(text: str) -> None:
    body = json.dumps({"a": [{text: 1}]}).encode()
    assert HALF.search(body)
    with pytest.raises(Refusal, match="surrogate"):
        refuse_unwritable(json.loads(body))


@pytest.mark.parametrize("text", ["\U0001f600", "é", "\\ud800"])
def test_whole_pairs_are_served(text: str) -> None:
    refuse_unwritable([text])
    assert text == "\\ud800" or not HALF.search(json.dumps(text).encode())


class Answering:
    """A scheduler's end of a communicator: it answers each message at the next turn of the loop."""

    def __init__(self) -> None:
        self.communicator: Any = None

    def send_pyobj(self, sent: Any) -> None:
        asyncio.get_running_loop().call_soon(self.communicator.handle_recv, sent)


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("mode", ["queueing", "watching"])
def test_a_call_right_after_its_answer(mode: str, guarded: bool) -> None:
    """SGLang has then woken another caller, who asserts that no call has come between."""

    async def call_twice(communicator: Any, name: str) -> list[Any]:
        call = getattr(FanOutCommunicator, f"{mode}_call")
        answers: list[Any] = []
        for sent in (f"{name}1", f"{name}2"):
            if guarded:
                answers += await check_control(call, communicator, sent)
            else:
                answers += await call(communicator, sent)
        return answers

    async def together() -> list[Any]:
        sender = Answering()
        sender.communicator = communicator = FanOutCommunicator(sender, 1, mode)
        calls = (call_twice(communicator, name) for name in "ab")
        return await asyncio.wait_for(asyncio.gather(*calls), 60)

    if mode == "watching":
        assert asyncio.run(together())[0] == ["a1", "a2"]
    elif guarded:
        assert asyncio.run(together()) == [["a1", "a2"], ["b1", "b2"]]
    else:
        with pytest.raises(AssertionError):
            asyncio.run(together())
