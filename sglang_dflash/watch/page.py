"""The page that shows the blocks of an answer while they are drafted and verified."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any, NoReturn

from sglang_dflash.errors import Refusal

PAGE = "/dflash"  # path on the server
CONFIG = '<script type="application/json" id="config">{}</script>'


def page(
    servers: Sequence[str] = (), without: str | None = None, api_key: str | None = None
) -> str:
    """The page as HTML; it loads nothing else.

    servers: the base URLs of DFLASH servers, none for the one that serves the page; without: that
    of a server of the same target without speculation; api_key: of all.
    """
    servers, without = [url.rstrip("/") for url in servers], without and without.rstrip("/")
    html = resources.files(__package__).joinpath("page.html").read_text()
    config = json.dumps({"servers": servers, "without": without, "api_key": api_key})
    assert html.count(CONFIG) == 1
    return html.replace(CONFIG, CONFIG.replace("{}", config.replace("<", "\\u003c")))


def add_page(app: Any) -> None:
    """Serve the page at `PAGE`. app: SGLang's application."""
    from starlette.responses import HTMLResponse

    def show() -> Any:
        return HTMLResponse(page())

    app.add_api_route(PAGE, show, include_in_schema=False, response_model=None)


def serve(html: str, port: int) -> NoReturn:
    """Serve the page on 127.0.0.1 until Ctrl-C; raises `Refusal` if the port is in use.

    The page may hold an API key, so its path is a secret. port: 0 for any free one.
    """
    path = f"/{secrets.token_urlsafe(16)}"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = secrets.compare_digest(self.path.encode(), path.encode())
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            if found:
                self.wfile.write(html.encode())

        def log_message(self, *_: object) -> None:
            pass

    try:
        http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise Refusal(
            f"No page on port {port}: {error.strerror}.", "Give another --port."
        ) from None
    with http:
        url = f"http://127.0.0.1:{http.server_port}{path}"
        print(f"{url} shows the server's blocks. Ctrl-C ends the page.", flush=True)
        http.serve_forever()
    raise AssertionError("The page is served until an exception ends it.")
