"""A pretended H100: SGLang and this package are real, only the device itself is not.

`pretend` comes before SGLang is imported, in a process of its own: SGLang decides at import what it
runs on.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

VARIABLE = "DFLASH_REHEARSAL"
LIBRARIES = ("libcuda.so.1", "libnuma.so.1")  # of a driver, which compiled kernels name


def environment(folder: Path) -> dict[str, str]:
    """Of a process that pretends. folder: for empty libraries in the place of the driver's."""
    import torch

    some = next(Path(torch.__file__).parent.glob("lib/libtorch_global_deps.so"))
    for name in LIBRARIES:
        (folder / name).symlink_to(some)
    # Other tests of this process have told SGLang, and its children, that there is no GPU.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    return {
        **kept,
        VARIABLE: "1",
        "LD_LIBRARY_PATH": str(folder),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def pretend() -> None:
    sys.setdlopenflags(os.RTLD_LAZY)  # the driver's functions are never called, nor looked up
    from test.rehearsal.device import cuda, kernels, twins

    cuda.pretend()
    kernels.pretend()
    twins.pretend()
