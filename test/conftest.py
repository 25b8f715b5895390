from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from test import forked, releases
from test.rehearsal import process
from test.servers import SERVERS

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# SGLang's modules read this when they are imported. The rehearsal simulates a GPU.
simulated = "DFLASH_REHEARSAL" in os.environ
if releases.OWN_STEP and not torch.cuda.is_available() and not simulated:
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
# On a CPU the first target of a process decides, and hybrid targets are compared in fp32.
os.environ["SGLANG_MAMBA_CONV_DTYPE"] = "float32"
os.environ["SGLANG_DFLASH_VERIFY_WIDTH"] = "full"  # tests count accepted drafts, unless they set it

settings.register_profile("any machine", deadline=None)  # its speed is no matter of a test
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random small target and a z-lab draft for it."""
    from test.checkpoints import draft_config, draft_weights, write_draft, write_target

    folder = tmp_path_factory.mktemp("small")
    write_target(folder / "target")
    config = draft_config()
    write_draft(folder / "draft", config, draft_weights(config))
    return folder


class ByServer(LoadScopeScheduling):
    """Gives a worker all tests of a shared server, or all tests of a file."""

    def _split_scope(self, nodeid: str) -> str:
        return shared_server(nodeid) or nodeid.split("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByServer | None:
    return ByServer(config, log) if config.getvalue("dist") == "loadscope" else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Let all workers fork from the same processes, which import nothing before a test asks."""
    forked.start()
    process.start()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files without tests of the installed SGLang may import what it lacks."""
    return None if releases.runs(str(collection_path.relative_to(config.rootpath))) else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The tests of a shared server come one after another, and before all others.

    First of all plugins: `--stepwise` drops what it finds before the test that failed last.
    """
    dropped = [item for item in items if not releases.runs(item.nodeid)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]
    for item in items:
        if item.get_closest_marker("full") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(3600))
    items.sort(key=lambda item: shared_server(item.nodeid) or "~")  # no server is named so


def shared_server(nodeid: str) -> str | None:
    """The name of the server that a test shares with others."""
    return next((name for name in SERVERS if nodeid.endswith((f"[{name}]", f"-{name}]"))), None)
