"""`sglang-dflash`: describe a draft, watch a DFLASH server, or run the bundled pair."""

from __future__ import annotations

import argparse
import sys

from sglang_dflash import __version__
from sglang_dflash.errors import Refusal
from sglang_dflash.tools.launch import ServerFailed, interrupt_on_signals


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
    except ServerFailed as error:
        print(error, file=sys.stderr)
        return 1
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

    watch = commands.add_parser("watch", help="a page that shows the blocks of DFLASH servers")
    watch.add_argument(
        "urls",
        nargs="*",
        metavar="url",
        help="URLs of DFLASH servers; default: start the bundled target with and without DFLASH",
    )
    watch.add_argument("--port", type=int, default=0, help="port of the page; default: a free one")

    chat = commands.add_parser("chat", help="chat in the terminal; accepted drafts are coloured")
    chat.add_argument("url", help="URL of a DFLASH server, such as http://127.0.0.1:30000")
    chat.add_argument("--max-tokens", type=int, default=512, help="longest answer; default: 512")
    chat.add_argument("--temperature", type=float, default=0.0, help="of sampling; default: 0")
    chat.add_argument("--thinking", action="store_true", help="let the model think first")
    for command in (watch, chat):
        command.add_argument("--api-key", metavar="KEY", help="API key of the servers")

    commands.add_parser("demo", help="compare the bundled pair without and with DFLASH")

    serve = commands.add_parser(
        "serve", help="serve the bundled pair; takes further flags of SGLang's server"
    )
    serve.add_argument("--port", type=int, default=30000, help="port on 127.0.0.1; default: 30000")
    return parser


def _run(chosen: argparse.Namespace, others: list[str]) -> int:
    """Run the chosen command, and import only what it needs."""
    match chosen.command:
        case "inspect":
            from sglang_dflash.tools.inspect import run as run_inspect

            return run_inspect(chosen.draft, chosen.target, chosen.json)
        case "watch":
            from sglang_dflash.tools.watch import run as run_watch

            run_watch(chosen.urls, chosen.port, chosen.api_key)
        case "chat":
            from sglang_dflash.tools.chat import run as run_chat

            sampling = {"max_new_tokens": chosen.max_tokens, "temperature": chosen.temperature}
            return run_chat(chosen.url, chosen.api_key, chosen.thinking, sampling)
        case "serve":
            from sglang_dflash.tools.serve import run as run_serve

            run_serve(chosen.port, others)
        case "demo":
            from sglang_dflash.tools.demo import run as run_demo

            return run_demo()
    raise AssertionError(f"{chosen.command} is not a command.")


if __name__ == "__main__":
    sys.exit(main())
