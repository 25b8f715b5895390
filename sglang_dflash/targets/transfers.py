"""What SGLang's transfer threads send from a prefill server to a decode server, over mooncake.

A request that fails, as by an abort, gives its slots back on both servers. A thread may still be
sending them. So the prefill server keeps a request until no thread sends it, and only then confirms
that it was aborted. The decode server waits for that. (SGLang 0.5.23 can do so itself.)
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from threading import Condition, Lock, get_ident
from typing import Any

import zmq
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.utils import KVClassType, TransferBackend

from sglang_dflash.seam.flags import process_serves_dflash

logger = logging.getLogger(__name__)

CONFIRMED = b"ABORT_ACK"  # begins a message; its room follows
SENT_IN = 30.0  # seconds, after which a thread has died or hangs
CONFIRMED_IN = 5.0  # seconds for the message; a server that started again does not send it


class Rooms:
    """The room of a request, SGLang's number for both of its halves, that each thread sends."""

    def __init__(self) -> None:
        self._sent_by: dict[int, int] = {}
        self._changed = Condition()

    def next(self, get: Callable[[Any], Any], queue: Any) -> Any:
        """What a thread sends next. It has sent all that it got before."""
        with self._changed:
            self._sent_by.pop(get_ident(), None)
            self._changed.notify_all()
        chunk = get(queue)
        with self._changed:
            self._sent_by[get_ident()] = chunk.room
        return chunk

    def wait(self, room: int) -> None:
        """Until no thread sends this room. It has failed, so that no thread will begin to."""
        with self._changed:
            self._changed.wait_for(lambda: room not in self._sent_by.values(), SENT_IN)


ROOMS = Rooms()  # of this process


def next_chunk(original: Callable[[Any], Any], queue: Any) -> Any:
    """AROUND `FastQueue.get`, by which a thread takes what it sends."""
    return ROOMS.next(original, queue)


def wait_until_sent(sender: Any) -> None:
    """Before `MooncakeKVSender.failure_exception`, after which SGLang frees the slots."""
    ROOMS.wait(sender.bootstrap_room)


class WholeMessages:
    """A socket by which threads send messages of several parts, one thread at a time."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket, self._lock = socket, Lock()

    def send_multipart(self, parts: Sequence[bytes]) -> None:
        if parts[0] == CONFIRMED:
            ROOMS.wait(int(parts[1]))
        with self._lock:
            self._socket.send_multipart(parts)


SOCKETS: dict[zmq.Socket[bytes], WholeMessages] = {}  # of this process, which SGLang keeps, too


def keep_messages_whole(socket: zmq.Socket[bytes], *_: Any, **__: Any) -> WholeMessages:
    """AFTER `CommonKVManager._connect`: one lock for each socket.

    A prefill server's threads send results of transfers, and confirm aborts. Where their parts mix,
    the decode server's thread ends that reads them, and all requests wait in vain.
    """
    return SOCKETS.setdefault(socket, WholeMessages(socket))


class Confirmations:
    """The socket by which a decode server is told of transfers. Keeps the rooms of ended ones."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._counts: Counter[int] = Counter()  # by room
        self._missed: dict[int, str] = {}  # rooms, and the address of the server that was silent
        self._changed = Condition()

    def recv_multipart(self) -> list[bytes]:
        message = self._socket.recv_multipart()
        if message[0] == CONFIRMED:
            with self._changed:
                self._count(int(message[1]))
                self._changed.notify_all()
        return message

    def _count(self, room: int) -> None:
        if room in self._missed:
            address = self._missed[room]
            self._missed = {r: of for r, of in self._missed.items() if of != address}
        else:
            self._counts[room] += 1

    def wait(self, room: int, ranks: int, address: str) -> None:
        """Until so many ranks of the prefill server at this address have confirmed an abort.

        A server that has not in time is not waited for, until it does.
        """
        with self._changed:
            seconds = 0.0 if address in self._missed.values() else CONFIRMED_IN
            if not self._changed.wait_for(lambda: self._counts[room] >= ranks, seconds):
                if seconds:
                    logger.warning("The prefill server %s does not confirm aborts.", address)
                self._missed[room] = address
            del self._counts[room]


def listen(manager: Any) -> None:
    """Before `MooncakeKVManager.start_decode_thread`, which reads the socket."""
    manager.server_socket = Confirmations(manager.server_socket)


def wait_until_confirmed(receiver: Any) -> None:
    """Before `MooncakeKVReceiver.failure_exception`, after which SGLang frees the slots."""
    manager, address = receiver.kv_mgr, receiver.bootstrap_addr
    if receiver.abort_notified and address in manager.prefill_info_table:
        infos = receiver.bootstrap_infos
        manager.server_socket.wait(receiver.bootstrap_room, len(infos), address)


def send_no_other_prompt(
    original: Callable[..., None], scheduler: Any, req: Any, *args: Any, **kwargs: Any
) -> None:
    """AROUND `send_kv_chunk`: of a request that this server has refused or aborted before, nothing.

    SGLang has prefilled a single token for it, in place of its prompt. A decode server that serves
    the request would go on from that, and its answer would be wrong. Here both halves fail.
    """
    if req.to_finish is None or req.to_finish.status_code is None:  # a running one's is none
        original(scheduler, req, *args, **kwargs)
        return
    manager, room = req.disagg_kv_sender.kv_mgr, req.bootstrap_room
    req.disagg_kv_sender.abort()
    for to in manager.transfer_infos.get(room, {}).values():
        manager.sync_status_to_decode_endpoint(
            to.endpoint, to.dst_port, room, KVPoll.Failed, manager.attn_tp_rank
        )


def keep_own_reason(_: None, req: Any, *__: Any, **___: Any) -> None:
    """AFTER `prepare_abort`, for a failed half: what has ended the request on this server."""
    req.finished_reason = req.to_finish or req.finished_reason


BEFORE: dict[KVClassType, tuple[str, Callable[[Any], None]]] = {
    KVClassType.MANAGER: ("start_decode_thread", listen),
    KVClassType.SENDER: ("failure_exception", wait_until_sent),
    KVClassType.RECEIVER: ("failure_exception", wait_until_confirmed),
}


def corrected(kind: type, backend: TransferBackend, class_type: KVClassType) -> type:
    """AFTER `get_kv_class`: mooncake's classes, which wait.

    They are imported only here. A hook of theirs would import `prometheus_client` in each server,
    before SGLang names its directory, and all metrics would be zero.
    """
    if backend is not TransferBackend.MOONCAKE or class_type not in BEFORE:
        return kind
    return _preceded(kind, *BEFORE[class_type]) if process_serves_dflash() else kind


@cache
def _preceded(kind: type, name: str, before: Callable[[Any], None]) -> type:
    """A subclass whose method of this name, without arguments, first calls `before`."""
    original = getattr(kind, name)

    def method(self: Any) -> None:
        before(self)
        original(self)

    return type(kind.__name__, (kind,), {name: method})
