"""The README for a package index, whose readers do not have the files that it links to.

With REPOSITORY_URL in the environment, links lead there. Without it they become plain text.
"""

import os
import re
from pathlib import Path

from setuptools import setup

LINK = re.compile(r"(!?)\[([^]]*)\]\((?!https?:|#)([^)]+)\)")


def absolute(found: re.Match[str]) -> str:
    image, text, path = found.groups()
    if repository := os.environ.get("REPOSITORY_URL"):
        kind = "raw" if image else "blob"
        return f"{image}[{text}]({repository.rstrip('/')}/{kind}/main/{path})"
    return "" if image else text


readme = LINK.sub(absolute, Path(__file__).with_name("README.md").read_text(encoding="utf-8"))
setup(long_description=readme, long_description_content_type="text/markdown")
