"""A draft follows its target: new weights, features and training, on one server under load."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from sglang_dflash.tiny.prompts import held_out
from test.servers import Client, chat, running
from training import refresh, rows
from training.answers import generate

CLIENTS = 3
TOKENS = 60


@contextmanager
def load(server: Client) -> Iterator[None]:
    """Clients that ask again and again. Each answer is complete."""
    prompts = [chat(each.prompt) for each in held_out("word", CLIENTS, seed=3)]
    stop = threading.Event()

    def ask(prompt: str) -> int:
        count = 0
        while not stop.is_set():
            reason = server.generate(prompt, max_new_tokens=TOKENS)["meta_info"]["finish_reason"]
            assert reason["type"] in ("stop", "length"), reason
            count += 1
        return count

    with ThreadPoolExecutor(CLIENTS) as pool:
        asked = [pool.submit(ask, prompt) for prompt in prompts]
        try:
            yield
        finally:
            stop.set()
        assert all(each.result() for each in asked)


def answers_equal(server: Client, target: Path) -> bool:
    """Whether greedy answers of the server are those of a target in Transformers, in fp32."""
    model = Qwen3ForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    prompts = [tokenizer.encode(chat(each.prompt)) for each in held_out("word", 4, seed=8)]
    expected = generate(model, prompts, TOKENS)
    return expected == [server.generate(p, max_new_tokens=TOKENS)["output_ids"] for p in prompts]


@pytest.mark.ci
@pytest.mark.timeout(3600)  # it trains, on a processor without vector units for many minutes
def test_a_draft_follows_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Accept lengths fall with the target's new weights, and rise with the trained draft's."""
    monkeypatch.setattr(rows, "BATCH", 4)  # 16 take 5 GB
    features = tmp_path / "features"
    features.mkdir()
    target = refresh.change_target(tmp_path, 6, "cpu")
    flags = (
        *("--speculative-dflash-features", str(features)),
        *("--speculative-dflash-features-form", "specforge"),
    )
    with running(*flags, dflash=True) as server:
        server_of_draft = refresh.Running(server.url)
        before = server_of_draft.accept_length()
        take = refresh.Running.refresh

        def take_under_load(*given: Any) -> None:
            with load(server):
                take(*given)

        monkeypatch.setattr(refresh.Running, "refresh", take_under_load)
        server_of_draft.refresh(target, "target")
        assert answers_equal(server, target)
        server_of_draft.collect(96, features)
        given = ["--work", tmp_path, "--url", server.url, "--features", features]
        given += ["--target", target, "--draft-steps", 80]
        monkeypatch.setattr("sys.argv", ["refresh", *map(str, given)])
        refresh.main()
        assert answers_equal(server, target)
        server.flush()
    *_, said = capsys.readouterr().out.splitlines()
    lengths = json.loads(said)
    assert lengths["before"] < before / 3
    assert lengths["after"] > 1.5 * lengths["before"]
