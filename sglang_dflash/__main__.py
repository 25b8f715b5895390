"""`python -m sglang_dflash`: the command `sglang-dflash`."""

import sys

from sglang_dflash.cli import main

sys.exit(main())
