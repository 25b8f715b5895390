"""Servers of several launches: TP over two nodes, and servers behind a router."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import requests

from sglang_dflash.tools.launch import Server, die_with_parent, free_port
from test import releases
from test.differential.draw import Request
from test.forked import ForkedServer
from test.servers import COMMON, DFLASH, REFERENCE, STRICT, Client, with_forks

SECONDS = 60  # of a router's start
DROPPED = {"custom_logit_processor", "logit_bias", "stop_regex"}  # by the router


@contextmanager
def launched(
    *of_each: tuple[str, ...],
    dflash: bool = True,
    environment: dict[str, str] | None = None,
    port: int | None = None,
) -> Iterator[list[ForkedServer]]:
    """Servers with these flags, which are started at once. They may end.

    port: of a single one
    """
    method = DFLASH if dflash else REFERENCE
    with TemporaryDirectory() as folder, ExitStack() as stack:
        given = with_forks({**os.environ, **STRICT, **(environment or {})}, folder)
        servers = []
        for flags in of_each:
            arguments = list(releases.flags(*COMMON, *method, *flags))
            servers.append(ForkedServer(arguments, given, port=port))
            stack.callback(servers[-1].stop)
        for server in servers:
            stack.enter_context(server)
        yield servers


@contextmanager
def two_nodes(*flags: str) -> Iterator[tuple[Client, Server]]:
    """A server with a rank on each of two nodes, which are both this machine; and the second."""
    of_both = "--tp", "2", "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}", *flags
    with launched(*((*of_both, "--node-rank", rank) for rank in ("0", "1"))) as (first, second):
        yield Client(first, flags), second


PREFILL, DECODE = ("--disaggregation-mode", "prefill"), ("--disaggregation-mode", "decode")
OVER_TCP = {"MOONCAKE_PROTOCOL": "tcp", "SGLANG_HOST_IP": "127.0.0.1"}
# Seconds after which a server gives up a request whose other half is gone. SGLang's are 300.
PATIENCE = {
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "30",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "30",
}


@dataclass
class Pair:
    """A server that prefills, and one that decodes."""

    prefill: Client
    decode: Client
    port: int  # of the prefill server's bootstrap

    def ask(self, body: dict[str, Any], seconds: int = 120) -> requests.Response:
        """The decode server's answer to a /generate request, which both get, as of a router."""
        room = random.getrandbits(62)
        given = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.port, "bootstrap_room": room}
        with ThreadPoolExecutor(2) as pool:
            _, answer = pool.map(
                lambda server: server.post("/generate", body | given, seconds),
                (self.prefill, self.decode),
            )
        assert isinstance(answer, requests.Response)
        return answer

    def generate(self, prompt: str, **sampling: Any) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": 64, **sampling}
        body = {"text": prompt, "sampling_params": sampling}
        response = self.ask(body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def flush(self) -> None:
        """Both are idle and have lost no slot, or this fails."""
        self.prefill.flush()
        self.decode.flush()

    def routed(self, *flags: str) -> AbstractContextManager[str]:
        """The URL of SGLang's router, with these flags, in front of both."""
        of_both = "--prefill", self.prefill.url, str(self.port), "--decode", self.decode.url
        return _router(["--pd-disaggregation", *of_both, *flags], workers=2)


@contextmanager
def prefill_and_decode(
    *flags: str,
    prefill: tuple[str, ...] = (),
    decode: tuple[str, ...] = (),
    dflash: bool = True,
    environment: dict[str, str] | None = None,
) -> Iterator[Pair]:
    """Two servers with these flags, and further ones for each. They must be alive at the end."""
    port = free_port()
    of_each = (
        (*PREFILL, "--disaggregation-bootstrap-port", str(port), *flags, *prefill),
        (*DECODE, *flags, *decode),
    )
    environment = OVER_TCP | (environment or {})
    with launched(*of_each, dflash=dflash, environment=environment) as servers:
        first, second = (Client(s, f, dflash) for s, f in zip(servers, of_each, strict=True))
        try:
            yield Pair(first, second, port)
        except Exception as error:
            for server in servers:
                error.add_note(server.tail(60))
            raise
        for server in servers:
            assert server.alive, server.tail(60)
            assert "Scheduler hit an exception" not in server.log.read_text()


def family(server: Server) -> list[psutil.Process]:
    """A server's processes, the main one first."""
    main = psutil.Process(server.pid)
    return [main, *main.children(recursive=True)]


def ends(servers: Sequence[Server], processes: Sequence[psutil.Process], seconds: float) -> bool:
    """Whether all of these processes, which are those of servers, end in time, with an error."""
    until = time.monotonic() + seconds
    mains = [server.pid for server in servers]  # somebody else's children
    _, alive = psutil.wait_procs([p for p in processes if p.pid not in mains], timeout=seconds)
    while any(server.alive for server in servers) and time.monotonic() < until:
        time.sleep(0.1)
    return not alive and all(server.status not in (None, 0) for server in servers)


def routed(*urls: str) -> AbstractContextManager[str]:
    """The URL of SGLang's own router in front of these servers."""
    return _router(["--worker-urls", *urls], workers=len(urls))


@contextmanager
def _router(flags: list[str], workers: int) -> Iterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(free_port()), *flags]
    with TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with log.open("w") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, preexec_fn=die_with_parent
            )
        try:
            _wait(process, url, workers)
            yield url
        except BaseException as error:
            error.add_note(log.read_text()[-3000:])
            raise
        finally:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, workers: int) -> None:
    """Until the router knows all its workers."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        assert process.poll() is None, "The router has ended."
        with suppress(requests.RequestException):
            answer = requests.get(f"{url}/workers", timeout=10)
            if (
                answer.ok
                and sum(each["is_healthy"] for each in answer.json()["workers"]) == workers
            ):
                return
        time.sleep(0.2)
    raise AssertionError(f"The router was not ready in {SECONDS} s.")


def is_kept(request: Request) -> bool:
    """Whether the router passes all of a request on, also what SGLang says against it.

    It knows no request by its id.
    """
    body = request.body
    sampling = body.get("sampling_params", {})
    return not (
        DROPPED & set(request.features)
        or request.abort_after is not None
        or "structural_tag" in sampling
        or body.get("min_tokens", 0) > body.get("max_tokens", 0)  # refused in the router's words
    )


def is_served_apart(request: Request) -> bool:
    """Whether servers that prefill and decode can answer, behind a router."""
    body = request.body
    of_a_prompt = "logprob_start_len" in body or (body.get("echo") and "logprobs" in body)
    sampling = body.get("sampling_params", {})
    in_routers_words = sampling.get("min_new_tokens", 0) > sampling.get("max_new_tokens", 0)
    in_one = {"n", "hidden_states", "token_ids_logprob"} & set(request.features)
    return is_kept(request) and not (in_one or of_a_prompt or in_routers_words)


def described_replicas(server: Client) -> list[dict[str, Any]]:
    """What a server says of each of its replicas, and the same of the first of them."""
    info = requests.get(f"{server.url}/server_info", timeout=30).json()
    described = [state["sglang_dflash"] for state in info["internal_states"]]
    assert info["sglang_dflash"] == described[0]
    return described


def assert_each_counts_its_steps(server: Client) -> None:
    """The steps of an answer are counted by the replica that gave it, of two, and by no other."""
    before = steps_by_replica(server)
    for replica in ("0", "1"):
        body = {"text": "def main(args):\n", "routed_dp_rank": int(replica)}
        answer = server.post("/generate", body | {"sampling_params": {"temperature": 0}}).json()
        assert answer["meta_info"]["dp_rank"] == int(replica)
        after = steps_by_replica(server)
        counted = {key: after[key] - before.get(key, 0) for key in after}
        assert counted[replica] == answer["meta_info"]["spec_verify_ct"]
        assert sum(counted.values()) == counted[replica]
        before = after


def steps_by_replica(server: Client) -> dict[str, float]:
    text = requests.get(f"{server.url}/metrics", timeout=30).text
    found = re.findall(r'^sglang:spec_verify_steps_total\{.*dp_rank="(\d)".*\} (\S+)$', text, re.M)
    return {replica: float(count) for replica, count in found}
