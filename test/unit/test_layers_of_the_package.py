"""Imports between the rooms of the package go one way, as docs/architecture.md says."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from sglang_dflash.seam.attached import ATTACHED

PACKAGE = Path(__file__).parents[2] / "sglang_dflash"
GUARD = PACKAGE.with_name("sglang_dflash_guard")

CORE = {"method", "kernels", "model", "step"}
# What each room may import. Nothing imports the engine, and wings do not import each other, except
# for `cpu`: it is a plugin of its own, and shares the mathematics of hybrid targets.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "seam": {"errors"},
    "method": set(),
    "checkpoint": {"errors"},
    "settings": {"errors", "checkpoint", "seam"},
    "kernels": {"method"},
    "model": {"method", "kernels", "checkpoint"},
    "step": {"method", "kernels", "model"},
    "logits": CORE,
    "adaptive": CORE | {"seam"},
    "backends": CORE | {"seam"},
    "targets": CORE | {"seam", "errors", "checkpoint", "settings"},
    "report": CORE | {"seam", "settings"},
    "trainer": CORE | {"errors", "checkpoint", "settings", "seam"},
    "streams": {"seam"},
    "cpu": {"seam", "targets", "checkpoint", "method"},
    "watch": {"errors"},
    "tiny": {"errors"},
    "tools": {"errors", "seam", "checkpoint", "settings", "watch", "tiny"},
}
ALLOWED["engine"] = ALLOWED.keys() - {"cpu", "tools", "tiny"}
ALLOWED["__main__"] = {"tools"}
FLOORS = 6
NEEDS_ONLY_TORCH = ("checkpoint", "kernels", "method", "settings")


def imports(package: Path) -> dict[str, set[str]]:
    """The modules of a package, and which modules of this project each one imports.

    Imports inside functions count, and so do those for type checkers.
    """
    modules = {}
    for root in (PACKAGE, GUARD):
        for file in root.rglob("*.py"):
            parts = file.relative_to(root.parent).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    found: dict[str, set[str]] = {}
    for name, file in modules.items():
        if package not in file.parents:
            continue
        found[name] = set()
        for node in ast.walk(ast.parse(file.read_text())):
            imported = []
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name} has a relative import"
                module = str(node.module)
                names = [f"{module}.{alias.name}" for alias in node.names]
                imported = [each if each in modules else module for each in names]
            found[name] |= {each for each in imported if each in modules} - {name}
    return found


def rooms(package: Path = PACKAGE) -> dict[str, set[str]]:
    """Each room, and those that it imports. A folder is one room with the folders in it."""
    found: dict[str, set[str]] = {}
    for module, others in imports(package).items():
        if "." not in module:
            continue
        room = module.split(".")[1]
        named = {other.split(".")[1] for other in others if "." in other}
        found.setdefault(room, set()).update(named - {room})
    return found


def test_rooms_import_what_the_table_allows() -> None:
    found = rooms()
    assert found.keys() == ALLOWED.keys()
    for room, others in found.items():
        assert others <= ALLOWED[room], room


def test_a_forbidden_import_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "sglang_dflash"
    for room in ("step", "report"):
        (package / room).mkdir(parents=True)
        (package / room / "__init__.py").touch()
    (package / "report" / "counts.py").touch()
    late = "def commit() -> None:\n    from sglang_dflash.report import counts\n"
    (package / "step" / "commit.py").write_text(late)
    monkeypatch.setitem(globals(), "PACKAGE", package)
    assert not rooms(package)["step"] <= ALLOWED["step"]


def test_floors() -> None:
    """No circle, neither of rooms nor of modules. A room is one floor above all that it imports."""
    list(TopologicalSorter(imports(PACKAGE)).static_order())
    list(TopologicalSorter(imports(GUARD)).static_order())
    floors: dict[str, int] = {}
    found = rooms()
    for room in TopologicalSorter(found).static_order():
        floors[room] = 1 + max((floors[other] for other in found[room]), default=0)
    assert max(floors.values()) == floors["engine"] == FLOORS


def test_no_loose_files() -> None:
    loose = {file.name for file in PACKAGE.iterdir() if file.is_file()}
    assert loose == {"__init__.py", "__main__.py", "errors.py", "py.typed"}


def test_the_guard_stands_alone() -> None:
    """It protects servers without DFLASH, and DFLASH serves without it."""
    for module, others in imports(GUARD).items():
        allowed = ("sglang_dflash_guard.", "sglang_dflash.seam.", "sglang_dflash.errors")
        assert all(other.startswith(allowed) for other in others), module
    for module, others in imports(PACKAGE).items():
        assert not any(other.startswith("sglang_dflash_guard") for other in others), module


def test_some_rooms_need_no_sglang() -> None:
    """They import only torch: no SGLang, neither directly nor through another module."""
    code = f"""
import importlib, pkgutil, sys
class Ban:
    def find_spec(self, name, *_):
        if name.split(".")[0] in ("sglang", "transformers"):
            raise ImportError(f"imported {{name}}")
sys.meta_path.insert(0, Ban())
for room in {NEEDS_ONLY_TORCH}:
    package = importlib.import_module(f"sglang_dflash.{{room}}")
    for module in pkgutil.walk_packages(package.__path__, f"{{package.__name__}}."):
        importlib.import_module(module.name)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.sglang
def test_plugins_leave_metrics_to_sglang() -> None:
    """`prometheus_client` counts for one process only where SGLang has not named a directory."""
    code = """
import sys
import sglang.srt.entrypoints.http_server
from sglang.srt.plugins import load_plugins
load_plugins()
assert "sglang_dflash_guard" in sys.modules
assert "prometheus_client" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_hangs_on_objects_of_sglang_is_listed() -> None:
    """Attributes of ours begin with `dflash`. SGLang has two such names of its own."""
    named = set()
    for file in [*PACKAGE.rglob("*.py"), *GUARD.rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            names = {ast.Attribute: "attr", ast.Constant: "value"}
            name = getattr(node, names.get(type(node), ""), None)
            if isinstance(name, str) and re.fullmatch(r"dflash(_\w+)?", name):
                named.add(name)
    sglangs = {"dflash_use_aux_hidden_state", "dflash_target_layer_ids"}
    others = {"dflash_config", "dflash_cpu", "dflash_guard"}  # a section, and plugins
    assert named - sglangs - others == ATTACHED.keys()
