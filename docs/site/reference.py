"""A reference page for each room of the package, made of its docstrings."""

from __future__ import annotations

from pathlib import Path
from pkgutil import iter_modules

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]


def on_config(config: MkDocsConfig) -> None:
    """Add the pages to the navigation."""
    assert config.nav is not None
    config.nav.append({"Reference": list(_pages())})


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, which are in no folder."""
    for path, module in _pages().items():
        text = f"# {module.removeprefix('sglang_dflash.')}\n\n::: {module}\n"
        files.append(File.generated(config, path, content=text))
    return files


def _pages() -> dict[str, str]:
    """The path of each page, and the module that it documents."""
    modules = ["sglang_dflash_guard"]
    for room in iter_modules([str(ROOT / "sglang_dflash")]):
        if room.name != "__main__":
            modules.append(f"sglang_dflash.{room.name}")
    return {f"reference/{module}.md": module for module in modules}
