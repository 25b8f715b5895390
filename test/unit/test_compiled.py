"""Our Triton kernels, compiled for a GPU that is not there."""

from __future__ import annotations

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_dflash.kernels import context_kv

HOPPER = GPUTarget("cuda", 90, 32)


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_context_kv(dtype, dim):
    """An annotation of a kernel's argument that is no tl.constexpr does not compile."""
    signature = {
        "kv": f"*{dtype}",
        "norm_weight": f"*{dtype}",
        "eps": "fp32",
        "cos_sin": "*fp32",
        "slots": "*i64",
        "addresses": "*i64",
        "ropes": "i32",
    }
    constants = {"heads": 8, "dim": dim, "padded": triton.next_power_of_2(dim // 2)}
    source = ASTSource(
        context_kv._store, signature | dict.fromkeys(constants, "constexpr"), constants
    )
    assert triton.compile(source, target=HOPPER).asm["cubin"]
