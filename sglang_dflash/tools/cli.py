"""`sglang-dflash`: describe a draft, watch a DFLASH server, or run the bundled pair."""

from __future__ import annotations

import argparse
import sys

from sglang_dflash import __version__
from sglang_dflash.errors import Refusal
from sglang_dflash.tools.launch import interrupt_on_signals


def main(arguments: list[str] | None = None) -> int:
    """Run a subcommand. Returns the exit status of the process."""
    parser = _parser()
    chosen, others = parser.parse_known_args(arguments)
    if others and chosen.command != "serve":
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    interrupt_on_signals()
    try:
        return _run(chosen, others)
    except Refusal as error:
        print(f"sglang-dflash: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sglang-dflash", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    inspect = commands.add_parser("inspect", help="describe a draft, and check that it fits")
    inspect.add_argument("draft", help="folder or hub id of a DFlash checkpoint")
    inspect.add_argument("--target", help="folder or hub id of the target it is for")
    inspect.add_argument("--json", action="store_true", help="print one line of JSON")

    watch = commands.add_parser("watch", help="a page that shows the blocks of a DFLASH server")
    watch.add_argument("url", help="of the server, such as http://127.0.0.1:30000")
    watch.add_argument("--without", metavar="URL", help="the same target without speculation")
    watch.add_argument("--port", type=int, default=0, help="of the page; default: a free one")
    watch.add_argument("--no-browser", action="store_true", help="only print the page's address")

    chat = commands.add_parser("chat", help="chat in the terminal; accepted drafts are coloured")
    chat.add_argument("url", help="of a DFLASH server, such as http://127.0.0.1:30000")
    chat.add_argument("--max-tokens", type=int, default=512, help="of an answer; default: 512")
    chat.add_argument("--temperature", type=float, default=0.0, help="default: 0")
    chat.add_argument("--thinking", action="store_true", help="let the chat template ask for it")
    for command in (watch, chat):
        command.add_argument("--api-key", metavar="KEY", help="of the servers")

    demo = commands.add_parser("demo", help="compare the bundled pair without and with DFLASH")
    demo.add_argument("--json", action="store_true", help="print one line of JSON")

    serve = commands.add_parser(
        "serve", help="serve the bundled pair; takes further flags of SGLang's server"
    )
    serve.add_argument("--port", type=int, default=30000, help="port on 127.0.0.1; default: 30000")
    serve.add_argument(
        "--compare",
        action="store_true",
        help="also serve the target without speculation; the page at /dflash compares both",
    )
    return parser


def _run(chosen: argparse.Namespace, others: list[str]) -> int:
    """Run the chosen command, and import only what it needs."""
    if chosen.command == "inspect":
        from sglang_dflash.tools.inspect import run as run_inspect

        return run_inspect(chosen.draft, chosen.target, chosen.json)
    if chosen.command == "watch":
        from sglang_dflash.watch.page import page
        from sglang_dflash.watch.page import serve as serve_page

        html = page(chosen.url, chosen.without, chosen.api_key)
        serve_page(html, chosen.port, browse=not chosen.no_browser)
    if chosen.command == "chat":
        from sglang_dflash.tools.chat import run as run_chat

        sampling = {"max_new_tokens": chosen.max_tokens, "temperature": chosen.temperature}
        return run_chat(chosen.url, chosen.api_key, chosen.thinking, sampling)
    if chosen.command == "serve":
        from sglang_dflash.tools.serve import run as run_serve

        run_serve(chosen.port, chosen.compare, others)
    from sglang_dflash.tools.demo import run as run_demo

    return run_demo(quiet=chosen.json)


if __name__ == "__main__":
    sys.exit(main())
