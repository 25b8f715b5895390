"""Distributions that a test makes up. SGLang finds one if its folder is on PYTHONPATH."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent


def distribution(folder: Path, name: str, version: str, plugin: str | None = None) -> Path:
    """Write a distribution. `plugin` is the body of its one SGLang plugin. Returns its path entry.

    SGLang loads the plugin in every process of a server, as it loads sglang-dflash.
    """
    root = folder / f"{name}-{version}"
    info = root / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if plugin is not None:
        (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {name}:plugin\n")
        (root / f"{name}.py").write_text(dedent(plugin))
    return root
