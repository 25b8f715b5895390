"""Threads that send KV from a prefill server to a decode server over mooncake."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import zmq
from sglang.srt.disaggregation.common.conn import CommonKVManager
from sglang.srt.disaggregation.common.utils import FastQueue

from sglang_dflash.targets import transfers
from test import inprocess  # loads the plugin

assert inprocess
MESSAGES = 400  # of each thread: as many as a socket keeps


class Manager:
    """All that `_connect` reads of one."""

    server_args = SimpleNamespace(speculative_algorithm="DFLASH")


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def inbox() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.rcvtimeo = 30_000  # ms
        yield socket


@pytest.mark.usefixtures("switching")
def test_messages_of_two_threads(inbox: zmq.Socket[bytes]) -> None:
    """A transfer's result has three parts, and a confirmed abort two."""
    manager, url = Manager(), _bind(inbox)
    sent = [b"1", b"2", b"3"], [b"ABORT_ACK", b"1"]

    def send(message: list[bytes]) -> None:
        for _ in range(MESSAGES):
            CommonKVManager._connect(manager, url).send_multipart(message)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(send, sent))
    for _ in range(2 * MESSAGES):
        assert inbox.recv_multipart() in sent


def test_an_abort_is_confirmed_when_nothing_is_sent(
    inbox: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread sends a chunk until it takes the next one. Other rooms are not waited for."""
    monkeypatch.setattr("sglang.srt.server_args._global_server_args", Manager.server_args)
    manager, url, queue = Manager(), _bind(inbox), FastQueue()
    begun, sent = threading.Event(), threading.Event()
    for room in (7, 9):
        queue.put(SimpleNamespace(room=room))

    def send() -> None:
        queue.get()
        begun.set()
        sent.wait(30)
        queue.get()

    with ThreadPoolExecutor(3) as threads:
        sending = threads.submit(send)
        assert begun.wait(30)
        socket = CommonKVManager._connect(manager, url)
        transfers.wait_until_sent(SimpleNamespace(bootstrap_room=8))
        socket.send_multipart([b"ABORT_ACK", b"8"])
        assert inbox.recv_multipart() == [b"ABORT_ACK", b"8"]
        confirmed = threads.submit(socket.send_multipart, [b"ABORT_ACK", b"7"])
        released = threads.submit(transfers.wait_until_sent, SimpleNamespace(bootstrap_room=7))
        assert not inbox.poll(300)
        assert not released.done()
        sent.set()
        assert inbox.recv_multipart() == [b"ABORT_ACK", b"7"]
        for each in (sending, confirmed, released):
            each.result(30)


def test_a_server_that_confirms_nothing(
    inbox: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for once, and again when it has confirmed one of those."""
    monkeypatch.setattr(transfers, "CONFIRMED_IN", 0.5)
    url, told = _bind(inbox), transfers.Confirmations(inbox)
    with zmq.Context() as context, context.socket(zmq.PUSH) as sender:
        sender.connect(url)
        assert _waits(told, 1) == pytest.approx(0.5, abs=0.4)
        assert _waits(told, 2) < 0.1
        for room in (b"2", b"3"):
            sender.send_multipart([b"ABORT_ACK", room])
            assert told.recv_multipart() == [b"ABORT_ACK", room]
        assert _waits(told, 3) < 0.1
        assert _waits(told, 4) > 0.4


def _waits(told: transfers.Confirmations, room: int) -> float:
    before = time.monotonic()
    told.wait(room, 1, "a:1")
    return time.monotonic() - before


def _bind(inbox: zmq.Socket[bytes]) -> str:
    return f"tcp://127.0.0.1:{inbox.bind_to_random_port('tcp://127.0.0.1')}"
