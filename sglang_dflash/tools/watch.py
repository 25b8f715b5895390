"""The page that shows the blocks of running servers, or of the bundled pair's."""

from __future__ import annotations

from typing import NoReturn

from sglang_dflash.tools import serve
from sglang_dflash.tools.launch import Server
from sglang_dflash.watch import page


def run(urls: list[str], port: int, api_key: str | None) -> NoReturn:
    """Serve the page until Ctrl-C.

    urls: the base URLs of DFLASH servers. None: start the bundled pair with and without DFLASH, and
    compare their speed.
    """
    if urls:
        page.serve(page.page(urls, api_key=api_key), port)
    print("Starting the bundled pair with and without DFLASH ...", flush=True)
    added = serve.environment()
    with (
        Server([*serve.flags(dflash=False), "--sleep-on-idle"], added) as plain,
        Server([*serve.flags(), "--sleep-on-idle"], added) as dflash,
    ):
        page.serve(page.page([dflash.url], plain.url), port)
