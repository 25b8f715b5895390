from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# SGLang's modules look when they are imported. The rehearsal pretends that there is a GPU.
if not torch.cuda.is_available() and "DFLASH_REHEARSAL" not in os.environ:
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ["SGLANG_DFLASH_VERIFY_WIDTH"] = "full"  # unless a test asks: accepted drafts are counted


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random small target and a z-lab draft for it."""
    from test.checkpoints import draft_config, draft_weights, write_draft, write_target

    folder = tmp_path_factory.mktemp("small")
    write_target(folder / "target")
    config = draft_config()
    write_draft(folder / "draft", config, draft_weights(config))
    return folder
