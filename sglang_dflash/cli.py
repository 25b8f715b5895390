"""`sglang-dflash`: describe a draft, or run the bundled pair."""

from __future__ import annotations

import argparse
import sys

from sglang_dflash.launch import interrupt_on_signals


def main(arguments: list[str] | None = None) -> int:
    """Run a subcommand. Returns the exit status of the process."""
    parser = argparse.ArgumentParser(prog="sglang-dflash", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="compare the bundled pair without and with DFLASH")
    demo.add_argument("--json", action="store_true", help="print only the last line")
    inspect = commands.add_parser("inspect", help="describe a draft, and check that it fits")
    inspect.add_argument("draft", help="folder or hub id of a DFlash checkpoint")
    inspect.add_argument("--target", help="folder or hub id of the target it is for")
    inspect.add_argument("--json", action="store_true", help="one line of JSON")
    chosen = parser.parse_args(arguments)
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
