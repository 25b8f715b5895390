"""The site has the layout of the repository, so a relative link is right in both.

MkDocs takes the pages of one folder, and their links may not leave it. README.md and the pages
beside the code lie outside of docs/. This hook hands MkDocs all pages under their paths in the
repository, and the files that they link to.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/**/*.md",
    "sglang_dflash/tiny/README.md",
    "test/rehearsal/README.md",
    "training/README.md",
)
LINK = re.compile(r"\]\(([^)#:\s]+)")  # the path of a link or an image


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The theme's files, and ours."""
    ours: dict[Path, InclusionLevel] = {}
    for pattern in PAGES:
        ours |= dict.fromkeys(sorted(ROOT.glob(pattern)), InclusionLevel.INCLUDED)
    for page in list(ours):
        for link in LINK.findall(page.read_text()):
            path = (page.parent / link).resolve()
            if path.is_file() and ROOT in path.parents:
                ours.setdefault(path, InclusionLevel.NOT_IN_NAV)
    found = [file for file in files if file.src_dir != config.docs_dir]
    for path, inclusion in ours.items():
        name = path.relative_to(ROOT).as_posix()
        found.append(File.generated(config, name, abs_src_path=str(path), inclusion=inclusion))
    return Files(found)
