"""Torch versions for the CPU, compared with the kernels that they replace."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from sglang_dflash.cpu.shims import apply_vocab_mask, murmur_hash32

MASK = 0xFFFFFFFF


def slow_murmur(words: list[int]) -> int:
    """MurmurHash3_x86_32 of four words, seed 0, in Python integers."""

    def rotate(x: int, by: int) -> int:
        return (x << by | x >> 32 - by) & MASK

    h = 0
    for k in words:
        k = rotate(k * 0xCC9E2D51 & MASK, 15) * 0x1B873593 & MASK
        h = (rotate(h ^ k, 13) * 5 + 0xE6546B64) & MASK
    h ^= 16
    h = (h ^ h >> 16) * 0x85EBCA6B & MASK
    h = (h ^ h >> 13) * 0xC2B2AE35 & MASK
    return h ^ h >> 16


def test_murmur_hash32() -> None:
    seeds = torch.tensor([0, 42, -1, 2**40 + 17, 2**63 - 1])
    positions = torch.tensor([0, 1, 2**31 - 1, 77, 5])
    columns = torch.arange(0, 3000, 7)
    got = murmur_hash32(seeds.to(torch.uint64), positions, columns)
    assert got.dtype == torch.uint32
    for i, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        words = [seed & MASK, seed >> 32 & MASK, position]
        assert got[i].tolist() == [slow_murmur([*words, c]) for c in columns.tolist()]


@pytest.mark.sglang
def test_murmur_hash32_equals_the_triton_kernel() -> None:
    """Bit for bit, with SGLang's kernel in Triton's interpreter."""
    code = """
import torch
from sglang.srt.layers.utils.hash import murmur_hash32 as kernel
from sglang_dflash.cpu.shims import murmur_hash32
seeds = torch.tensor([0, 42, -1, 2**40 + 17], dtype=torch.int64).to(torch.uint64)
positions, columns = torch.tensor([0, 1, 99, 2**31 - 1]), torch.arange(2050)
assert torch.equal(kernel(seeds, positions, columns), murmur_hash32(seeds, positions, columns))
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_apply_vocab_mask() -> None:
    logits = torch.zeros(2, 70)
    mask = torch.full((2, 3), -1, dtype=torch.int32)
    mask[1] = torch.tensor([1 << 5, -(2**31), 0], dtype=torch.int64).to(torch.int32)
    apply_vocab_mask(None, logits, mask)
    assert (logits[0] == 0).all()
    assert (logits[1] == 0).nonzero().flatten().tolist() == [5, 63]
