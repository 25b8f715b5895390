"""The machine and the versions of a measurement."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

PACKAGES = ("sglang", "torch", "transformers", "flashinfer-python", "sglang-kernel")


def hardware() -> dict[str, Any]:
    found: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "load_1m": round(os.getloadavg()[0], 2),  # before the run: other load makes timings noisy
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
        found["gpus"] = torch.cuda.device_count()
    return found


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "commit": _commit()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def sglang_of(python: str) -> str:
    """The version of SGLang that this Python imports."""
    code = "import importlib.metadata; print(importlib.metadata.version('sglang'))"
    said = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return said.stdout.strip()


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _commit() -> str:
    """$COMMIT, else the checkout's, with + if files differ. "unknown" without a checkout."""
    if given := os.environ.get("COMMIT"):
        return given
    root = Path(__file__).parent

    def git(*command: str) -> str:
        return subprocess.run(
            ["git", *command], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("diff", "HEAD") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
