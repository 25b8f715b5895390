"""HTTPS: SGLang's first request, the checks of bodies and the page are served with it."""

from __future__ import annotations

import ssl
import time
from pathlib import Path

import httpx
import pytest
import requests

from sglang_dflash.tiny.prompts import held_out
from sglang_dflash.watch.page import PAGE
from test.certificates import write_certificate
from test.servers import Client, chat, running

PROMPT = chat(held_out("word", 1, seed=71)[0].prompt)
WAYS = {
    "uvicorn": (),
    "two workers": ("--tokenizer-worker-num", "2"),
    "Granian": ("--enable-http2",),
}
RELOADED_IN = 60  # seconds

pytestmark = pytest.mark.ci


def certified(key: Path, certificate: Path) -> tuple[str, ...]:
    return "--ssl-keyfile", str(key), "--ssl-certfile", str(certificate)


@pytest.mark.parametrize(
    "way", ["uvicorn", "Granian", pytest.param("two workers", marks=pytest.mark.full)]
)
def test_serves(
    way: str, reference: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    password = None if way == "Granian" else "secret"
    key, certificate = write_certificate(tmp_path, password)
    flags = certified(key, certificate)
    if password is not None:
        flags += "--ssl-keyfile-password", password
    expected = reference.generate(PROMPT)["output_ids"]
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
    flags += "--ssl-ca-certs", str(certificate), *WAYS[way]  # SGLang trusts it in its first request
    with running(*flags, dflash=True) as server:
        answer = server.generate(PROMPT)
        assert answer["output_ids"] == expected
        assert answer["meta_info"]["spec_verify_ct"] > 0
        wrong = server.post("/generate", {"text": PROMPT, "sampling_params": {"n": "x"}})
        assert wrong.status_code == 400
        assert "drafted" in requests.get(f"{server.url}{PAGE}", timeout=30).text
        context = ssl.create_default_context(cafile=str(certificate))
        two = way == "Granian"
        with httpx.Client(verify=context, http1=not two, http2=two, timeout=60) as client:
            version = client.get(f"{server.url}/health").http_version
        assert version == ("HTTP/2" if two else "HTTP/1.1")
        with pytest.raises(requests.RequestException):
            requests.get(server.url.replace("https", "http"), timeout=30)


def test_a_new_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--enable-ssl-refresh: files that change are served soon."""
    key, certificate = write_certificate(tmp_path)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
    with running(*certified(key, certificate), "--enable-ssl-refresh", dflash=True) as server:
        answer = server.generate(PROMPT)
        write_certificate(tmp_path)
        deadline = time.monotonic() + RELOADED_IN
        address = "127.0.0.1", server.server.port
        while ssl.get_server_certificate(address) != certificate.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.5)
        assert server.generate(PROMPT)["output_ids"] == answer["output_ids"]
