"""Kernels against their torch twins, in Triton's interpreter on the CPU."""

from __future__ import annotations

import os

import pytest
import torch

from sglang_dflash.kernels import context_kv

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="run by test_in_the_interpreter"
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("layers", "ropes"), [(3, 1), (2, 2)])
@pytest.mark.parametrize(("heads", "dim"), [(2, 128), (1, 96), (3, 64)])
def test_context_kv(dtype, layers, ropes, heads, dim):
    torch.manual_seed(0)
    n, size = 7, 40
    kv = torch.randn(n, layers, 2, heads, dim).to(dtype)
    weight, cos_sin = torch.rand(layers, dim).to(dtype), torch.randn(n, ropes, dim)
    slots = 1 + torch.randperm(size - 1)[:n]
    slots[2] = 0  # passed by
    written = []
    for store in (context_kv.store_in_torch, context_kv.launch_store):
        k, v = ([torch.zeros(size, heads, dim, dtype=dtype) for _ in range(layers)] for _ in "kv")
        store(kv, weight, 1e-6, cos_sin, slots, context_kv.Pools.of(k, v))
        written.append((torch.stack(k), torch.stack(v)))
    assert not any(pool[:, 0].any() for pool in written[1])
    (k_twin, v_twin), (k_kernel, v_kernel) = ((k[:, 1:], v[:, 1:]) for k, v in written)
    assert torch.equal(v_twin, v_kernel)
    assert v_twin[:, slots[slots > 0] - 1].abs().sum(dim=(0, 2, 3)).gt(0).all()
    unit = torch.finfo(dtype).eps * k_twin.abs().max().item()  # two roundings, and cancellation
    torch.testing.assert_close(k_twin, k_kernel, rtol=0, atol=2 * unit)
