"""`python -m sglang_dflash`: the command `sglang-dflash`."""

import sys

from sglang_dflash.tools.cli import main

sys.exit(main())
