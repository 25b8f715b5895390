"""Every module and room of the package has its line in a page of docs/reference/."""

from __future__ import annotations

from pathlib import Path
from pkgutil import iter_modules

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger

ROOT = Path(__file__).parents[2]
LOG = get_plugin_logger(__name__)  # --strict turns its warnings into an error


def on_config(config: MkDocsConfig) -> None:
    """Warn of each one that has none."""
    named = set()
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        lines = page.read_text().splitlines()
        named |= {line.removeprefix("::: ") for line in lines if line.startswith("::: ")}
    for module in iter_modules([str(ROOT / "sglang_dflash")]):
        if f"sglang_dflash.{module.name}" not in named:
            LOG.warning(f"No page of docs/reference/ has a line '::: sglang_dflash.{module.name}'.")
