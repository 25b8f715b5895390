"""Prompts that consist of embeddings, which SGLang serves without a radix cache, in bfloat16."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from sglang_dflash.tiny import TARGET
from sglang_dflash.tiny.prompts import held_out
from test.servers import ALL_FEATURES, Client, chat, running

PROMPTS = [chat(example.prompt) for example in held_out("word", 2, seed=19)]
RULES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "frequency_penalty": 0.5},
    {"temperature": 0.8, "sampling_seed": 4},
]


FLAGS = (*ALL_FEATURES, "--disable-radix-cache")


@pytest.fixture(scope="module")
def bodies() -> list[dict[str, Any]]:
    """Each prompt as tokens and as the rows of the target's embedding, by each rule."""
    table = load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"].bfloat16()
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    found = []
    for prompt, rules in product(PROMPTS, RULES):
        ids = tokenizer(prompt)["input_ids"]
        for given in ({"input_ids": ids}, {"input_embeds": table[ids].float().tolist()}):
            found.append({**given, "sampling_params": {"max_new_tokens": 40, **rules}})
    return found


def said(server: Client, body: dict[str, Any]) -> list[int]:
    answer = server.post("/generate", body)
    assert answer.status_code == 200, answer.text
    meta = answer.json()["meta_info"]
    assert meta["spec_verify_ct"] < meta["completion_tokens"]
    ids: list[int] = answer.json()["output_ids"]
    return ids


@pytest.mark.ci
def test_input_embeds(bodies: list[dict[str, Any]]) -> None:
    """Embeddings are answered as their tokens, also together with them."""
    with running(*FLAGS, "--dtype", "bfloat16", dflash=True) as server:
        answers = [said(server, body) for body in bodies]
        assert answers[::2] == answers[1::2]
        with ThreadPoolExecutor(len(bodies)) as pool:
            together = list(pool.map(lambda body: said(server, body), bodies))
        assert [len(ids) for ids in together] == [len(ids) for ids in answers]


@pytest.mark.ci
def test_a_target_in_another_dtype(bodies: list[dict[str, Any]]) -> None:
    with running(*FLAGS, dflash=True) as server:
        refused = server.post("/generate", bodies[1])
        assert refused.status_code == 400
        assert "SGLang makes bfloat16 of it" in refused.text
        assert said(server, bodies[0])
