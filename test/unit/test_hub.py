"""Drafts by hub id, from a small server that implements the hub's protocol."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch

from sglang_dflash.tools.cli import main
from sglang_dflash.tools.launch import free_port
from test.checkpoints import draft_config, draft_weights, speculators_draft, write_draft
from test.formats import dspine_of_tencent, write

COMMIT = "0" * 40


class Hub(ThreadingHTTPServer):
    """Serves one repository, `org/draft`, and counts the bytes that it sent of each file."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.given: dict[str, int] = {}
        self.broken = False  # it answers, and only that it cannot

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.server.broken:
            return self.reply("{}", status=503)
        path = self.path.split("?")[0]
        if path.startswith("/api/models/org/draft"):
            sizes = {file.name: file.stat().st_size for file in self.server.folder.iterdir()}
            if not sizes:
                return self.reply("{}", status=404)
            if "/tree/" in path:
                files = [
                    {"type": "file", "path": name, "size": size, "oid": COMMIT}
                    for name, size in sizes.items()
                ]
                return self.reply(json.dumps(files))
            files = [{"rfilename": name} for name in sizes]
            return self.reply(json.dumps({"id": "org/draft", "sha": COMMIT, "siblings": files}))
        file = self.server.folder / path.rsplit("/", 1)[-1]
        if not path.startswith("/org/draft/resolve/") or not file.is_file():
            return self.reply("{}", status=404)
        data, asked = file.read_bytes(), self.headers.get("Range")
        if asked:
            first, last = asked.removeprefix("bytes=").split("-")
            data = data[int(first) : int(last or len(data)) + 1]
        if self.command == "GET":
            given = self.server.given
            given[file.name] = given.get(file.name, 0) + len(data)
        return self.reply(data, status=206 if asked else 200)

    def reply(self, body: bytes | str, status: int = 200) -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Repo-Commit", COMMIT)
        if not any(self.server.folder.iterdir()):
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("ETag", f'"{hashlib.sha1(self.path.encode()).hexdigest()}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    (tmp_path / "repository").mkdir()
    with Hub(tmp_path / "repository") as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def run(url: str, cache: Path, code: str, status: int = 0) -> str:
    """The output of a process that asks the hub at this address. It must end with this status."""
    environment = {"HF_ENDPOINT": url, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0"}
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment, "HF_HUB_DISABLE_XET": "1"},
        timeout=120,
    )
    assert result.returncode == status, result.stderr
    assert "Traceback" not in result.stderr
    return result.stdout


INSPECT = """
from sglang_dflash.tools.cli import main
assert main(["inspect", "org/draft", "--json"]) == 0
"""
FETCH = """
from sglang_dflash.checkpoint import hub, read_draft
config, tensors = read_draft(hub.draft_folder("org/draft"))
print(config.mask_embedding, config.own_embedding, config.draft_vocab_size, tensors.known)
"""
INSPECTED = """
import sys
from sglang_dflash.tools.cli import main
sys.exit(main(["inspect", "org/draft", "--json"]))
"""
REFUSED = """
from sglang_dflash.checkpoint import hub
from sglang_dflash.errors import Refusal
try:
    hub.draft_folder("org/draft")
except Refusal as refusal:
    print(refusal)
"""


def test_inspect_reads_headers_alone(hub: Hub, tmp_path: Path) -> None:
    """Only configs and headers are fetched. They are enough to count the parameters.

    A table of RoPE is none.
    """
    config = draft_config(intermediate_size=4096)
    weights = draft_weights(config)
    table = {"model.rotary_emb.inv_freq": torch.zeros(16)}
    file = write_draft(hub.folder, config, weights | table) / "model.safetensors"
    report = json.loads(run(hub.url, tmp_path / "cache", INSPECT))
    assert report["fits"]
    assert report["parameters"] == sum(tensor.numel() for tensor in weights.values())
    assert 0 < hub.given["model.safetensors"] < 200_000 < file.stat().st_size


def test_inspect_reads_headers_of_all_files(hub: Hub, tmp_path: Path) -> None:
    """A draft of Tencent's training has some of its tensors in a second file."""
    config, weights, _ = dspine_of_tencent()
    write(hub.folder, config, weights)
    report = json.loads(run(hub.url, tmp_path / "cache", INSPECT))
    assert report["fits"]
    assert report["family"] == "DSpine"


def test_a_server_fetches_all_that_a_draft_is(hub: Hub, tmp_path: Path) -> None:
    """All files, with mask_embedding.pt, are fetched before the draft is read."""
    config, weights = speculators_draft()
    write_draft(hub.folder, config, weights)
    torch.save(torch.zeros(64), hub.folder / "mask_embedding.pt")
    assert run(hub.url, tmp_path / "cache", FETCH).split() == ["True", "True", "64", "True"]


def test_no_weights_of_another_method_are_fetched(hub: Hub, tmp_path: Path) -> None:
    config = draft_config(dflash_config={"selector_rank": 8})
    write_draft(hub.folder, config, draft_weights(config))
    assert "DFlash 2" in run(hub.url, tmp_path / "cache", REFUSED)
    assert "model.safetensors" not in hub.given


def inspected(url: str, cache: Path, status: int) -> list[str]:
    """What `inspect` says about a draft of the hub, when it ends with this status."""
    report = json.loads(run(url, cache, INSPECTED, status))
    assert report["fits"] == (status == 0)
    assert report["reached"] == (status != 3)
    return [problem["what"] for problem in report["problems"]]


def test_a_hub_that_does_not_answer_is_an_outcome_of_its_own(tmp_path: Path) -> None:
    """Nothing listens at this address. That says nothing about the draft."""
    [what] = inspected(f"http://127.0.0.1:{free_port()}", tmp_path / "cache", status=3)
    assert "the model hub did not answer" in what


def test_a_hub_that_fails(hub: Hub, tmp_path: Path) -> None:
    hub.broken = True
    [what] = inspected(hub.url, tmp_path / "cache", status=3)
    assert "the model hub did not answer" in what


def test_a_hub_that_fails_behind_the_configs(hub: Hub, tmp_path: Path) -> None:
    """The config is in the cache, the headers of the weights are not."""
    config = draft_config()
    write_draft(hub.folder, config, draft_weights(config))
    inspected(hub.url, tmp_path / "cache", status=0)
    assert (
        "did not answer"
        in inspected(f"http://127.0.0.1:{free_port()}", tmp_path / "cache", status=3)[0]
    )


def test_a_hub_without_the_draft(hub: Hub, tmp_path: Path) -> None:
    """It has answered, and so has the form of a name that is no id."""
    [what] = inspected(hub.url, tmp_path / "cache", status=2)
    assert "the model hub does not have it" in what
    assert main(["inspect", "no id/at all"]) == 2


def test_broken_headers_on_the_hub(hub: Hub, tmp_path: Path) -> None:
    (hub.folder / "config.json").write_text(json.dumps(draft_config()))
    for header in (b"[]", b'{"a": 7}', b'{"a": {"dtype": 1, "shape": "x", "data_offsets": []}}'):
        content = len(header).to_bytes(8, "little") + header
        (hub.folder / "model.safetensors").write_bytes(content)
        [what] = inspected(hub.url, tmp_path / "cache", status=2)
        assert "The hub's headers of org/draft cannot be read" in what


def test_what_a_person_sees_of_a_hub_that_does_not_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No draft has been looked at, so it neither fits nor does not fit. The tests are offline."""
    assert main(["inspect", "org/draft"]) == 3
    out = " ".join(capsys.readouterr().out.split())
    assert "not known: The name 'org/draft' is not a local folder" in out
    assert "fit" not in out
