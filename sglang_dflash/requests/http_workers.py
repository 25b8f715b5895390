"""HTTP in processes of their own, as `--tokenizer-worker-num` and `--enable-http2` start them.

SGLang loads no plugins there. So uvicorn and Granian get the application of this module.
"""

from __future__ import annotations

import signal
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from sglang.srt.environ import envs
from sglang.srt.plugins import load_plugins
from uvicorn.supervisors import Multiprocess

from sglang_dflash.algorithm import is_dflash

APPLICATION = f"{__name__}:application"
PATIENCE = envs.SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT
# SGLang lets uvicorn end a process that answers nothing for 10 s, also while it imports SGLang. On
# a busy machine that takes longer, each time anew, and the server is never ready.
BUSY_SECONDS = 120


def replace_application(_: Any, server_args: Any, *__: Any) -> None:
    """BEFORE `write_data_for_multi_tokenizer`: the next call starts HTTP in other processes.

    This call names SGLang's own application.
    """
    if not is_dflash(server_args):
        return
    _door().refuse_taken_port(server_args.host, server_args.port)
    _keep_sigquit()
    library, name = ("granian", "Granian") if server_args.enable_http2 else ("uvicorn", "run")
    module = import_module(library)
    start = getattr(module, name)

    def start_ours(target: str, **given: Any) -> Any:
        setattr(module, name, start)
        if library == "uvicorn" and not PATIENCE.is_set():
            given["timeout_worker_healthcheck"] = BUSY_SECONDS
        elif library == "granian" and server_args.ssl_certfile is not None:
            given |= _certified(server_args)
        return start(APPLICATION, factory=True, **given)

    setattr(module, name, start_ours)


def _certified(server_args: Any) -> dict[str, Path]:
    """Granian's arguments for HTTPS. SGLang gives it texts, and Granian fails."""
    return {"ssl_cert": Path(server_args.ssl_certfile), "ssl_key": Path(server_args.ssl_keyfile)}


def _keep_sigquit() -> None:
    """SGLang sends itself SIGQUIT when a child dies. uvicorn's supervisor would ignore it."""
    handler = signal.getsignal(signal.SIGQUIT)
    if callable(handler):
        end = partial(handler, signal.SIGQUIT, None)
        Multiprocess.handle_quit = staticmethod(end)  # type: ignore[attr-defined]


def application() -> FastAPI:
    """SGLang's application with the checks of a DFLASH server, in a process of its own."""
    load_plugins()
    app: FastAPI = _door().app
    _door().install_checks()
    return app


def _door() -> Any:
    """The module that imports SGLang's HTTP server, which must find the plugins loaded."""
    return import_module("sglang_dflash.requests.http_door")
