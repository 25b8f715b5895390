"""Features over HTTP: by the native API and by the OpenAI client, beside requests without them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from openai import OpenAI
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sglang_dflash.tiny import TARGET
from sglang_dflash.tiny.prompts import held_out
from test.releases import RANKS
from test.servers import Client, chat, running
from training.shapes import DRAFT_CONFIG

WANTED = {"custom_params": {"features": True}}
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


def stored(folder: Path, rid: str) -> dict[str, torch.Tensor]:
    """The features of a request, which a thread writes behind its answer."""
    file = folder / f"{rid}.safetensors"
    for _ in range(200):
        if file.exists():
            break
        time.sleep(0.05)
    found: dict[str, torch.Tensor] = load_file(file)
    return found


def check(features: dict[str, torch.Tensor], prompt_tokens: int, tokens: int) -> None:
    """All tokens of prompt and answer but the last are there, with the target's own states."""
    ids, states, mask = (features[name] for name in ("token_ids", "hidden_states", "loss_mask"))
    assert prompt_tokens + tokens - 1 <= len(ids) <= prompt_tokens + tokens
    assert mask.tolist() == [False] * prompt_tokens + [True] * (len(ids) - prompt_tokens)
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    with torch.no_grad():
        layers = target(ids[None], output_hidden_states=True).hidden_states
        last = target.model.norm(states[:, -1])
    wanted = [layers[layer + 1][0] for layer in DRAFT_CONFIG["dflash_config"]["target_layer_ids"]]
    torch.testing.assert_close(states[:, :-1], torch.stack(wanted, dim=1), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(last, layers[-1][0], atol=1e-3, rtol=1e-3)


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
        check(stored(folder, meta["id"]), meta["prompt_tokens"], meta["completion_tokens"])
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
    check(stored(folder, answer.id), usage.prompt_tokens, usage.completion_tokens)


def test_requests_that_cannot_have_them(writer: Client) -> None:
    """A file elsewhere is not written."""
    body = {"text": "x", "rid": "../x", "sampling_params": WANTED}
    refused = writer.post("/generate", body)
    assert refused.status_code == 400
    assert "rid" in refused.text
    assert writer.generate("def f(", rid="../y", max_new_tokens=4)["output_ids"]
