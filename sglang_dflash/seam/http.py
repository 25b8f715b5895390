"""SGLang's HTTP application, in each process that serves it, before it serves.

`--tokenizer-worker-num` and `--enable-http2` serve HTTP in processes of their own, where SGLang
loads no plugins. So uvicorn and Granian get the application of this module.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from sglang_dflash.errors import Refusal
from sglang_dflash.seam.hook import Gate, Hook, always, register

APPLICATION = f"{__name__}:application"
PATIENCE = "SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT"
# SGLang lets uvicorn end a process that answers nothing for 10 s, also while it imports SGLang. On
# a busy machine that takes longer, each time anew, and the server is never ready.
BUSY_SECONDS = 120
# What plugins do to the application, and where they do it: functions of FastAPI's application.
_preparations: list[tuple[Gate, Callable[[Any], None]]] = []


def prepare(when: Gate, function: Callable[[Any], None]) -> None:
    """Let `function(app)` prepare the application of each process, if `when(server_args)`."""
    if not _preparations:
        register(HTTP_HOOKS, "sglang_dflash")
    _preparations.append((when, function))


def before_http(server_args: Any, *_: Any, **__: Any) -> None:
    """BEFORE `set_uvicorn_logging_configs`: the last call before the main process serves HTTP.

    A hook on a function of `http_server` would import that module in every scheduler.
    """
    if any(when(server_args) for when, _ in _preparations):
        _refuse_taken_port(server_args.host, server_args.port)
        _prepare(server_args)


def replace_application(_: Any, server_args: Any, *__: Any) -> None:
    """BEFORE `write_data_for_multi_tokenizer`: the next call starts HTTP in other processes.

    This call names SGLang's own application.
    """
    if not any(when(server_args) for when, _ in _preparations):
        return
    _refuse_taken_port(server_args.host, server_args.port)
    _keep_sigquit()
    library, name = ("granian", "Granian") if server_args.enable_http2 else ("uvicorn", "run")
    module = import_module(library)
    start = getattr(module, name)

    def start_ours(target: str, **given: Any) -> Any:
        setattr(module, name, start)
        if library == "uvicorn" and PATIENCE not in os.environ:
            given["timeout_worker_healthcheck"] = BUSY_SECONDS
        elif library == "granian" and server_args.ssl_certfile is not None:
            given |= _certified(server_args)
        return start(APPLICATION, factory=True, **given)

    setattr(module, name, start_ours)


def _certified(server_args: Any) -> dict[str, Path]:
    """Granian's arguments for HTTPS. SGLang gives it texts, and Granian fails."""
    return {"ssl_cert": Path(server_args.ssl_certfile), "ssl_key": Path(server_args.ssl_keyfile)}


def application() -> Any:
    """SGLang's application as the plugins prepare it, in a process of its own."""
    from sglang.srt.managers import multi_tokenizer_mixin as shared
    from sglang.srt.plugins import load_plugins

    load_plugins()
    main = shared.get_main_process_id()
    _, server_args, _ = shared.read_from_shared_memory(f"multi_tokenizer_args_{main}")
    return _prepare(server_args)


def _prepare(server_args: Any) -> Any:
    """The application, prepared by all plugins whose gate is open."""
    from sglang.srt.entrypoints.http_server import app  # it must find the plugins loaded

    app.add_exception_handler(Refusal, bad_request)  # some handlers do not expect any error
    for when, function in _preparations:
        if when(server_args):
            function(app)
    return app


async def bad_request(request: Any, refusal: Exception) -> Any:
    """HTTP 400 as SGLang writes it at the endpoint of this request."""
    from fastapi import HTTPException

    written = request.app.exception_handlers[HTTPException]
    return await written(request, HTTPException(400, str(refusal)))


def _refuse_taken_port(host: str, port: int) -> None:
    """Raise a `Refusal` if the port is in use: SGLang's warm-up would wait for minutes.

    uvicorn reports any other error.
    """
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, kind, protocol, _, address in addresses:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as uvicorn does
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind(address)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    taken = f"Port {port} of {host} is in use."
                    raise Refusal(taken, "Give another --port.") from None


def _keep_sigquit() -> None:
    """SGLang sends itself SIGQUIT when a child dies. uvicorn's supervisor would ignore it."""
    from uvicorn.supervisors import Multiprocess

    handler = signal.getsignal(signal.SIGQUIT)
    if callable(handler):
        end = partial(handler, signal.SIGQUIT, None)
        Multiprocess.handle_quit = staticmethod(end)  # type: ignore[attr-defined]


HTTP_HOOKS = (
    Hook(
        "utils.set_uvicorn_logging_configs",
        "BEFORE",
        "seam.http:before_http",
        "this is the last call before HTTP is served",
        always,
    ),
    Hook(
        "managers.multi_tokenizer_mixin.write_data_for_multi_tokenizer",
        "BEFORE",
        "seam.http:replace_application",
        "processes that serve HTTP beside the main one load no plugins",
        always,
    ),
)
