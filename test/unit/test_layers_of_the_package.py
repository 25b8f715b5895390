"""T modules import only torch: no SGLang, neither directly nor through another module."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "sglang_dflash"
GUARD = PACKAGE.with_name("sglang_dflash_guard")


def test_t_modules_need_no_sglang() -> None:
    code = """
import sys
class Ban:
    def find_spec(self, name, *_):
        if name.split(".")[0] in ("sglang", "transformers"):
            raise ImportError(f"a T module imported {name}")
sys.meta_path.insert(0, Ban())
import pkgutil, importlib
import sglang_dflash.checkpoint, sglang_dflash.core, sglang_dflash.kernels
for package in (sglang_dflash.checkpoint, sglang_dflash.core, sglang_dflash.kernels):
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
import sglang_dflash.options, sglang_dflash.platforms
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_but_its_plugin_reaches_the_cpu() -> None:
    """`cpu/` runs SGLang without a GPU, for any algorithm. No code outside depends on it."""
    named = []
    for file in PACKAGE.rglob("*.py"):
        if PACKAGE / "cpu" in file.parents:
            continue
        if re.search(r"sglang_dflash\.cpu|\bis_cpu\b|\.is_cuda\b", file.read_text()):
            named.append(file.name)
    assert named == []


def test_the_guard_stands_alone() -> None:
    """It protects servers without DFLASH, and DFLASH serves without it."""
    imports = re.compile(r"^\s*(?:from|import) (sglang_dflash[\w.]*)", re.MULTILINE)
    for file in PACKAGE.rglob("*.py"):
        assert not re.search("sglang_dflash_guard", file.read_text()), file
    for file in GUARD.rglob("*.py"):
        for module in imports.findall(file.read_text()):
            allowed = ("sglang_dflash_guard.", "sglang_dflash.seam.", "sglang_dflash.errors")
            assert module.startswith(allowed), (file, module)


def test_one_name_has_one_file() -> None:
    names = [file.name for file in PACKAGE.rglob("*.py") if file.name != "__init__.py"]
    assert sorted(names) == sorted(set(names))
