"""T modules import torch alone: no SGLang, directly or through another module."""

from __future__ import annotations

import subprocess
import sys


def test_t_modules_need_no_sglang():
    code = """
import sys
class Ban:
    def find_spec(self, name, *_):
        if name.split(".")[0] in ("sglang", "transformers"):
            raise ImportError(f"a T module imported {name}")
sys.meta_path.insert(0, Ban())
import sglang_dflash.core.accept, sglang_dflash.core.block, sglang_dflash.core.slots
import sglang_dflash.core.penalties, sglang_dflash.kernels.context_kv
import sglang_dflash.kernels.accept, sglang_dflash.kernels.block
import sglang_dflash.config, sglang_dflash.checkpoint, sglang_dflash.checkpoint.fit
import sglang_dflash.checkpoint.loading, sglang_dflash.core.width, sglang_dflash.core.simulate
import sglang_dflash.cpu.argmax, sglang_dflash.cpu.context_kv
import sglang_dflash.cpu.widths
"""
    subprocess.run([sys.executable, "-c", code], check=True)
