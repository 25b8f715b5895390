"""`sglang-dflash`: demo."""

from __future__ import annotations

import argparse
import signal
import sys


def main(arguments: list[str] | None = None) -> int:
    """Run a subcommand; its exit status is the process's."""
    parser = argparse.ArgumentParser(prog="sglang-dflash", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="the bundled pair without and with DFLASH, compared")
    demo.add_argument("--json", action="store_true", help="print the last line only")
    chosen = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so servers are ended
    from sglang_dflash.demo import run

    return run(quiet=chosen.json)


if __name__ == "__main__":
    sys.exit(main())
