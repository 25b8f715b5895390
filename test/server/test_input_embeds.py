"""Prompts that consist of embeddings, which SGLang serves without a radix cache, in bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from sglang_dflash.tiny import TARGET
from sglang_dflash.tiny.prompts import held_out
from test.servers import ALL_FEATURES, chat, running

PROMPTS = [chat(example.prompt) for example in held_out("word", 2, seed=19)]
RULES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "frequency_penalty": 0.5},
    {"temperature": 0.8, "sampling_seed": 4},
]


@pytest.mark.ci
def test_input_embeds() -> None:
    """The rows of the target's embedding are answered as their tokens."""
    table = load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"].bfloat16()
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    flags = (*ALL_FEATURES, "--disable-radix-cache", "--dtype", "bfloat16")
    with running(*flags, dflash=True) as server:
        for prompt in PROMPTS:
            ids = tokenizer(prompt)["input_ids"]
            for rules in RULES:
                sampling = {"sampling_params": {"max_new_tokens": 40, **rules}}
                given: list[dict[str, Any]] = [
                    {"input_ids": ids},
                    {"input_embeds": table[ids].float().tolist()},
                ]
                said = [server.post("/generate", body | sampling) for body in given]
                assert [answer.status_code for answer in said] == [200, 200], said[1].text
                expected, found = (answer.json() for answer in said)
                assert found["output_ids"] == expected["output_ids"]
                assert found["meta_info"]["spec_verify_ct"] < 30
