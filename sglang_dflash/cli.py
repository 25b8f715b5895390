"""`sglang-dflash`: describe a draft, serve the bundled pair, or compare it without DFLASH."""

from __future__ import annotations

import argparse
import sys

from sglang_dflash import __version__
from sglang_dflash.launch import interrupt_on_signals


def main(arguments: list[str] | None = None) -> int:
    """Run a subcommand. Returns the exit status of the process."""
    parser = argparse.ArgumentParser(prog="sglang-dflash", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="compare the bundled pair without and with DFLASH")
    demo.add_argument("--json", action="store_true", help="print one line of JSON")
    serve = commands.add_parser(
        "serve", help="serve the bundled pair; takes further flags of SGLang's server"
    )
    serve.add_argument("--port", type=int, default=30000, help="port on 127.0.0.1; default: 30000")
    inspect = commands.add_parser("inspect", help="describe a draft, and check that it fits")
    inspect.add_argument("draft", help="folder or hub id of a DFlash checkpoint")
    inspect.add_argument("--target", help="folder or hub id of the target it is for")
    inspect.add_argument("--json", action="store_true", help="print one line of JSON")
    chosen, others = parser.parse_known_args(arguments)
    if chosen.command == "serve":
        from sglang_dflash.serve import run as run_serve

        run_serve(chosen.port, others)
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    interrupt_on_signals()
    try:
        if chosen.command == "inspect":
            from sglang_dflash.inspect_draft import run as run_inspect

            return run_inspect(chosen.draft, chosen.target, chosen.json)
        from sglang_dflash.demo import run as run_demo

        return run_demo(quiet=chosen.json)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
