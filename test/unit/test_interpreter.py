from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_in_the_interpreter():
    """Triton decides at import whether it interprets: so in a process of its own."""
    tests = Path(__file__).with_name("test_kernels.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(tests)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
