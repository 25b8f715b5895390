"""Real servers over real HTTP, with the bundled pair in fp32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from sglang_dflash.launch import Server
from sglang_dflash.tiny import DRAFT, TARGET

STRICT = {
    "OMP_NUM_THREADS": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_DFLASH_VERIFY_WIDTH": "auto",
}
FULL = ["--speculative-dflash-verify-width", "full"]  # for tests that count accepted drafts
COMMON = [
    "--model-path",
    str(TARGET),
    "--dtype",
    "float32",
    "--sleep-on-idle",
    "--random-seed",
    "1",
]
COMMON += [
    "--max-total-tokens",
    "16384",
    "--max-running-requests",
    "32",
    "--cuda-graph-max-bs",
    "32",
]
# Under overlap SGLang counts penalties a token late, and the prompt's last token as output.
REFERENCE = ["--disable-overlap-schedule"]
DFLASH = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(DRAFT)]


class Client:
    """A server and the native API."""

    def __init__(self, server: Server) -> None:
        self.server, self.url = server, server.url

    def post(self, path: str, body: dict[str, Any] | None = None) -> requests.Response:
        return requests.post(f"{self.url}{path}", json=body or {}, timeout=300)

    def generate(self, prompt: str | list[int], **options: Any) -> dict[str, Any]:
        """One /generate call; options that are no fields of the request are sampling parameters."""
        fields = {k: options.pop(k) for k in list(options) if k in FIELDS}
        options.setdefault("temperature", 0)
        options.setdefault("max_new_tokens", 64)
        key = "text" if isinstance(prompt, str) else "input_ids"
        answer = self.post("/generate", {key: prompt, "sampling_params": options, **fields})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def generate_many(self, prompts: list[Any], **options: Any) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, **options), prompts))

    def flush(self) -> None:
        assert self.post("/flush_cache?timeout=30").status_code == 200  # it waits until idle


FIELDS = {
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "token_ids_logprob",
    "return_hidden_states",
    "custom_logit_processor",
    "rid",
    "session_params",
}


@contextlib.contextmanager
def running(
    *flags: str, dflash: bool, environment: dict[str, str] | None = None
) -> Iterator[Client]:
    """A server that is alive at the end, or the test fails with its log."""
    arguments = COMMON + (DFLASH if dflash else REFERENCE) + list(flags)
    with Server(arguments, {**STRICT, **(environment or {})}) as server:
        try:
            yield Client(server)
        except Exception as error:
            if not server.alive:
                raise AssertionError(server.tail(60)) from error
            raise
        assert server.alive, server.tail(60)
        assert "Scheduler hit an exception" not in server.log.read_text()


@pytest.fixture(scope="session")
def reference() -> Iterator[Client]:
    """The same install without --speculative-algorithm."""
    with running("--disable-radix-cache", dflash=False) as client:
        yield client


def chat(prompt: str) -> str:
    """The bundled target's chat format, one user turn."""
    return f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
