"""Ends of a server: each has a status that is not 0 and a line that says why, or is clean."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil
import requests

from sglang_dflash.tiny import DRAFT
from sglang_dflash.tools.launch import LAUNCH, Server, ServerFailed, free_port
from test import releases
from test.chaos.disturb import child, processes
from test.chaos.load import Load, questions
from test.forked import ForkedServer
from test.servers import COMMON, DFLASH, REFERENCE, STRICT, Client, with_forks

ENDS_IN = 10  # seconds


@contextmanager
def doomed(*flags: str, dflash: bool = True, forks: bool = True) -> Iterator[Client]:
    """A server that may end inside the block."""
    given = {**os.environ, **STRICT}
    method = DFLASH if dflash else REFERENCE
    with (
        TemporaryDirectory() as folder,
        (ForkedServer if forks else Server)(
            list(releases.flags(*COMMON, *method, *flags)),
            with_forks(given, folder) if forks else given,
        ) as server,
    ):
        yield Client(server, flags, dflash)


def ended(server: Client, family: list[psutil.Process]) -> int:
    """The status of a server that ends in time, and of which no process is left."""
    deadline = time.monotonic() + ENDS_IN
    while server.server.alive:
        assert time.monotonic() < deadline, f"It runs {ENDS_IN} s later.\n{server.server.tail()}"
        time.sleep(0.1)
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive, f"left behind: {alive}"
    assert server.server.status is not None
    return server.server.status


def killed(title: str, *flags: str) -> None:
    """A process of a server with these flags is killed, the server ends, and its log says why.

    Its parent and its children end with it, so the log may name one of them. So may a rank that
    computes with it, and ends first.
    """
    with doomed(*flags) as server:
        asked, family = questions(server, random.Random(1), 4), processes(server)
        load = Load(server, asked, 1)
        with load:
            time.sleep(1)
            victim = child(server, title)
            dying = [victim.ppid(), victim.pid, *(each.pid for each in victim.children())]
            victim.kill()
            status = ended(server, family)
        assert status != 0
        log = server.server.log.read_text()
        lines = [f"(pid={pid}) crashed" for pid in dying] + ["Another rank of this server is gone"]
        assert any(line in log for line in lines), server.server.tail()
        lost = [error for error in load.wrong if "ConnectionError" not in error]
        assert all("Chunked" in error or "Connection" in error for error in lost), lost


def killed_scheduler() -> None:
    """A killed scheduler ends the server, and the log says so."""
    killed("scheduler")


def killed_detokenizer() -> None:
    """A killed detokenizer ends the server, and the log says so."""
    killed("detokenizer")


def killed_scheduler_of_workers() -> None:
    """So does one whose server has other processes for HTTP, of uvicorn or of Granian."""
    killed("scheduler", "--tokenizer-worker-num", "2")
    killed("scheduler", "--enable-http2")


REPLICAS = "data_parallel_controller", "scheduler_DP0", "scheduler_DP1", "detokenizer"  # titles


def killed_part_of_replicas(title: str) -> None:
    """So does any process of a server of two replicas."""
    killed(title, "--dp-size", "2")


def killed_replicas() -> None:
    """So does any process of a server of two replicas."""
    for title in REPLICAS:
        killed_part_of_replicas(title)


def killed_detokenizer_with_a_dump() -> None:
    """--crash-dump-folder gets the requests that ran, and the end comes as soon as without it.

    SGLang waits for core dumps if a scheduler lives.
    """
    with TemporaryDirectory() as folder:
        killed("detokenizer", "--crash-dump-folder", folder)
        [dump] = Path(folder).glob("*/crash_dump_*.pkl")
        requests_of = pickle.loads(dump.read_bytes())["requests"]
    assert len(requests_of) > 0


def vanished_draft() -> None:
    """A draft that is deleted while it is served changes nothing.

    SIGTERM ends the server. SGLang would wait for ever for a request that it has refused.
    """
    with TemporaryDirectory() as folder:
        draft = Path(shutil.copytree(DRAFT, Path(folder, "draft")))
        with doomed("--speculative-draft-model-path", str(draft)) as server:
            asked, family = questions(server, random.Random(2), 4), processes(server)
            shutil.rmtree(draft)
            for question in asked:
                again = server.generate(question.prompt, **question.sampling)
                assert again["output_ids"] == question.answer
            info = requests.get(f"{server.url}/server_info", timeout=30).json()
            assert info["sglang_dflash"]["draft"] == str(draft)
            for n in (1, 2):
                too_long = {"input_ids": [5] * 40_000, "sampling_params": {"n": n}}
                assert server.post("/generate", too_long).status_code == 400
            os.kill(server.server.pid, signal.SIGTERM)
            ended(server, family)


def full_disk() -> None:
    """A disk that is full, for the log and all other files, does not stop the answers."""
    with doomed("--enable-metrics") as server:
        asked = questions(server, random.Random(3), 4)
        most = server.server.log.stat().st_size
        for process in processes(server):  # no write makes a file larger than the log is now
            process.rlimit(psutil.RLIMIT_FSIZE, (most, most))
        for question in [*asked, *asked]:
            again = server.generate(question.prompt, **question.sampling)
            assert again["output_ids"] == question.answer
        assert server.server.log.stat().st_size == most


def not_ready(*flags: str) -> str:
    """The log of a server that ends before it serves."""
    with TemporaryDirectory() as folder:
        environment = with_forks({**os.environ, **STRICT}, folder)
        server = ForkedServer(list(releases.flags(*COMMON, *DFLASH, *flags)), environment)
        try:
            with server:
                raise AssertionError("it serves")
        except ServerFailed:
            assert server.status != 0
            return server.log.read_text()
        finally:
            server.log.unlink()


def port_in_use() -> None:
    """A port that is in use is named, whichever process would serve HTTP."""
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        for flags in ((), ("--enable-http2",)):
            said = not_ready("--port", str(port), *flags)
            assert f"sglang-dflash: Port {port} of 127.0.0.1 is in use." in said, said[-2000:]


def answered_file() -> None:
    """--debug-tensor-dump-input-file: SGLang reads the tokens of a file, and ends itself."""
    with TemporaryDirectory() as folder:
        tokens = Path(folder, "tokens.npy")
        np.save(tokens, np.array([10, 11, 12]))
        said = not_ready("--debug-tensor-dump-input-file", str(tokens))
    assert "ready to roll" in said, said[-2000:]
    assert "Traceback" not in said, said[-2000:]


def missing_draft() -> None:
    """A draft that is not there is refused in one line."""
    with TemporaryDirectory() as folder:
        command = [*LAUNCH, *releases.flags(*COMMON, *DFLASH)]
        command += "--speculative-draft-model-path", str(Path(folder, "gone"))
        environment = {**os.environ, **STRICT}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode != 0
    said = done.stderr + done.stdout
    assert "Traceback" not in said, said[-2000:]
    assert said.splitlines()[-1].startswith("sglang-dflash: "), said[-2000:]


DEATHS = (
    killed_scheduler,
    killed_detokenizer,
    killed_scheduler_of_workers,
    killed_detokenizer_with_a_dump,
    vanished_draft,
    full_disk,
    port_in_use,
    missing_draft,
    answered_file,
)
