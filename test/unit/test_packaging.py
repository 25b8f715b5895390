"""The distributions: what they hold, how large they are, and what an installation changes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash import __version__
from sglang_dflash.seam.release import SERVED
from sglang_dflash.tiny import DRAFT, TARGET

REPO = Path(__file__).parents[2]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
DEMO = tomllib.loads((REPO / "demo" / "pyproject.toml").read_text())["project"]
DEFAULT, *_ = SERVED  # the release that our own extra and image bring
MOST_BYTES = 2_000_000  # of the wheel without weights
BUILD = "import setuptools.build_meta as backend, sys; backend.{}(sys.argv[1])"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this tree, apart from results, build folders and caches."""
    folder = tmp_path_factory.mktemp("source")
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "results")
    return Path(shutil.copytree(REPO, folder / "repo", ignore=ignored))


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel, the wheel of the weights and the source distribution."""
    out = tmp_path_factory.mktemp("built")
    for folder, kind in (
        (source, "build_wheel"),
        (source / "demo", "build_wheel"),
        (source, "build_sdist"),
    ):
        command = [sys.executable, "-c", BUILD.format(kind), str(out)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return out


def wheel(built: Path, name: str) -> Path:
    [found] = built.glob(f"{name}-{__version__}-*.whl")
    return found


def held(archive: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(archive) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def metadata(archive: Path) -> str:
    [text] = [data for name, data in held(archive).items() if name.endswith(".dist-info/METADATA")]
    return text.decode()


def test_the_wheel_is_small(built: Path) -> None:
    """It has the package and the guard: no weights, tests or recipes."""
    package = wheel(built, "sglang_dflash")
    assert package.stat().st_size < MOST_BYTES
    tops = {Path(name).parts[0].partition("-")[0] for name in held(package)}
    assert tops == {"sglang_dflash", "sglang_dflash_guard"}
    assert not any(name.endswith(".safetensors") for name in held(package))
    assert "sglang_dflash/watch/page.html" in held(package)
    assert "sglang_dflash/py.typed" in held(package)


def test_both_wheels_hold_the_pair(built: Path) -> None:
    """Installed together, they give the files of the pair, byte for byte."""
    package, weights = (
        held(wheel(built, name)) for name in ("sglang_dflash", "sglang_dflash_demo")
    )
    pair = {name: data for name, data in (package | weights).items() if "/tiny/" in name}
    tiny = TARGET.parent
    beside = ("__init__.py", "README.md", "prompts.py", "prompts.jsonl")
    files = [*TARGET.iterdir(), *DRAFT.iterdir(), *(tiny / name for name in beside)]
    assert set(pair) == {f"sglang_dflash/tiny/{file.relative_to(tiny)}" for file in files}
    for file in files:
        assert pair[f"sglang_dflash/tiny/{file.relative_to(tiny)}"] == file.read_bytes()
    names = {file.name for file in files}
    assert {"model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    assert not set(package) & set(weights)


def test_without_the_weights(built: Path, tmp_path: Path) -> None:
    """The command of the bundled pair is refused in a line."""
    with zipfile.ZipFile(wheel(built, "sglang_dflash")) as opened:
        opened.extractall(tmp_path)
    command = [sys.executable, "-m", "sglang_dflash", "serve"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "sglang-dflash: The weights of the bundled pair are not installed"
    )
    assert "sglang-dflash[demo]" in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_installation_changes_no_other_package() -> None:
    """It asks for nothing that SGLang's environment pins. SGLang is an extra, in one version."""
    assert PROJECT["dependencies"] == ["rich"]
    assert PROJECT["optional-dependencies"]["sglang"] == [f"sglang=={DEFAULT}"]
    assert PROJECT["optional-dependencies"]["demo"] == [f"sglang-dflash-demo=={__version__}"]
    assert DEMO["version"] == __version__
    assert "dependencies" not in DEMO


@pytest.mark.ci
def test_pip_changes_no_other_package(built: Path) -> None:
    """pip itself, asked what it would do in this environment."""
    command: list[Any] = [sys.executable, "-m", "uv", "pip", "install", "--dry-run", "--offline"]
    command += ["--python", sys.executable, "--reinstall-package", "sglang-dflash"]
    command += ["--find-links", built, wheel(built, "sglang_dflash")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    changed = re.findall(r"^ [-+~] (\S+?)[=@ ]", done.stderr, re.MULTILINE)
    assert set(changed) == {"sglang-dflash"}, done.stderr


def test_the_source_distribution(built: Path) -> None:
    """It has tests, pages and the changelog, and no weights."""
    [archive] = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    wanted = {
        "CHANGELOG.md",
        "README.md",
        "LICENSE",
        "docs/limits.md",
        "test/unit/test_packaging.py",
    }
    wanted |= {
        "Makefile",
        "mkdocs.yml",
        "requirements.lock",
        "requirements-0.5.23.lock",
        "demo/pyproject.toml",
        "test/servers.py",
    }
    assert wanted <= names
    assert not any(name.endswith((".safetensors", ".pyc")) for name in names)


LINK = re.compile(r"\]\(([^)]+)\)")


def test_links_on_a_package_index(
    built: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No link is relative there: it leads to the repository, or it is plain text."""
    plain = metadata(wheel(built, "sglang_dflash"))
    assert "DFlash speculative decoding to SGLang" in plain
    assert [link for link in LINK.findall(plain) if not link.startswith(("https://", "#"))] == []
    monkeypatch.setenv("REPOSITORY_URL", "https://example.org/us/it/")
    command = [sys.executable, "-c", BUILD.format("build_wheel"), str(tmp_path)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    links = LINK.findall(metadata(wheel(tmp_path, "sglang_dflash")))
    assert "https://example.org/us/it/blob/main/docs/limits.md" in links
    assert "https://example.org/us/it/raw/main/docs/images/watch.png" in links
    assert all(link.startswith(("https://", "#")) for link in links)


def test_the_dockerfile_begins_with_this_sglang() -> None:
    [image] = re.findall(r"^FROM (\S+)$", (REPO / "Dockerfile").read_text(), re.MULTILINE)
    assert image == f"lmsysorg/sglang:v{DEFAULT}"
