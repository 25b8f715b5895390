"""A simulated H100: SGLang and this package are real, only the device is not.

`pretend` must run before SGLang is imported, in its own process, because SGLang decides at import
which device it runs on.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

VARIABLE = "DFLASH_REHEARSAL"
LIBRARIES = ("libcuda.so.1", "libnuma.so.1")  # of a driver; compiled kernels name them


def environment(folder: Path) -> dict[str, str]:
    """The environment of such a process. folder: gets empty libraries that replace the driver's."""
    import torch

    some = next(Path(torch.__file__).parent.glob("lib/libtorch_global_deps.so"))
    for name in LIBRARIES:
        (folder / name).symlink_to(some)
    # Other tests of this process have set variables that say that there is no GPU.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    return {
        **kept,
        VARIABLE: "1",
        "LD_LIBRARY_PATH": str(folder),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


@cache
def pretend() -> None:
    os.environ["SGLANG_MAMBA_CONV_DTYPE"] = "float32"  # as all else here
    sys.setdlopenflags(os.RTLD_LAZY)  # the driver's functions are neither called nor looked up
    from test.rehearsal.device import compiled, cuda, kernels, nccl

    cuda.pretend()
    kernels.pretend()
    compiled.pretend()
    nccl.pretend()
