"""Features over HTTP: by the native API and by the OpenAI client, beside requests without them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM

from sglang_dflash.tiny import TARGET
from sglang_dflash.tiny.prompts import held_out
from test.features import WANTED, check, read
from test.releases import RANKS
from test.servers import Client, chat, running
from training.shapes import DRAFT_CONFIG

PROMPTS = [chat(each.prompt) for each in held_out("word", 4, seed=9)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("features")


@pytest.fixture(scope="module")
def writer(folder: Path) -> Iterator[Client]:
    """A server with small chunks, and on SGLang 0.5.23 with two ranks."""
    flags = ("--speculative-dflash-features", str(folder), "--chunked-prefill-size", "32")
    with running(*flags, *RANKS, dflash=True) as server:
        yield server


def check_tokens(folder: Path, rid: str, prompt: int, answer: int) -> None:
    """Of a request with so many tokens in its prompt and its answer."""
    found = read(folder, rid)
    ids = found["input_ids"].tolist()
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    layers = [layer + 1 for layer in DRAFT_CONFIG["dflash_config"]["target_layer_ids"]]
    ids += [0] * (prompt + answer - len(ids))  # the last one, whose states are not there
    check(model, found, ids[:prompt], ids[prompt:], layers=layers)


def test_features_of_answers(writer: Client, folder: Path) -> None:
    """Requests that ask and requests that do not, twice each, at once: all answers are the same."""
    with ThreadPoolExecutor(16) as pool:
        plain = [pool.submit(writer.generate, prompt) for prompt in PROMPTS * 2]
        asked = [pool.submit(writer.generate, prompt, **WANTED) for prompt in PROMPTS * 2]
    answers = [each.result()["output_ids"] for each in plain]
    assert [each.result()["output_ids"] for each in asked] == answers
    for each in asked:
        meta = each.result()["meta_info"]
        assert meta["cached_tokens"] == 0
        check_tokens(folder, meta["id"], meta["prompt_tokens"], meta["completion_tokens"])
    assert len(list(folder.iterdir())) == len(asked)
    writer.flush()


def test_features_of_a_chat(writer: Client, folder: Path) -> None:
    client = OpenAI(base_url=f"{writer.url}/v1", api_key="none")
    answer = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "Mia has 3 coins and buys 4. How many are there?"}],
        extra_body=WANTED,
        temperature=0,
        max_tokens=20,
    )
    assert answer.usage is not None
    usage = answer.usage
    check_tokens(folder, answer.id, usage.prompt_tokens, usage.completion_tokens)


def test_requests_that_cannot_have_them(writer: Client) -> None:
    """A file elsewhere is not written."""
    body = {"text": "x", "rid": "../x", "sampling_params": WANTED}
    refused = writer.post("/generate", body)
    assert refused.status_code == 400
    assert "rid" in refused.text
    assert writer.generate("def f(", rid="../y", max_new_tokens=4)["output_ids"]
