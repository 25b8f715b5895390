"""Makes the plugins findable on a GPU machine that has no installer.

SGLang finds plugins by the entry points of installed distributions. PYTHONPATH alone is not enough.
"""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

ROOT = Path(__file__).parent.parent
GROUP = "sglang.srt.plugins"


def write(site: Path) -> None:
    """Write a `*.dist-info` to `site` for each distribution whose plugins are not installed."""
    site.mkdir(parents=True, exist_ok=True)
    installed = entry_points(group=GROUP).names
    for folder in (ROOT, ROOT / "benchmark" / "builtin_cpu"):
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        plugins = project["entry-points"][GROUP]
        if plugins.keys() <= installed:
            continue
        name, version = project["name"], project.get("version", "0")  # ours is in its source
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = [f"{plugin} = {target}" for plugin, target in plugins.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
