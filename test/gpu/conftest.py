"""What the tests of this folder share: the bundled pair in a real scheduler on the GPU."""

from __future__ import annotations

import os
from typing import Any

# Triton multiplies fp32 as TF32 by default, whose rounding differs between kernels.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")

import pytest
import torch
from transformers import AutoTokenizer

from sglang_dflash.tiny import DRAFT, TARGET, data
from test.inprocess import InProcess

# A dry run on a CPU shows that a test itself works: in fp32, with the one backend there is.
DRY_RUN = "DFLASH_DRY_RUN" in os.environ and not torch.cuda.is_available()
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() or DRY_RUN), reason="needs a CUDA GPU"),
]
TOKENIZER = AutoTokenizer.from_pretrained(TARGET)
N = {"max_new_tokens": 96, "ignore_eos": True}
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def prompts(count: int) -> list[list[int]]:
    """Held-out word problems as chat prompts."""
    examples = data.held_out("word", count, seed=4)
    return [TOKENIZER.encode(CHAT.format(example.prompt)) for example in examples]


def engine(draft: bool = True, **flags: Any) -> InProcess:
    flags = {"dtype": "bfloat16", "mem_fraction_static": 0.3, "max_running_requests": 8} | flags
    if DRY_RUN:
        flags |= {"attention_backend": None, "dtype": "float32"}
    return InProcess(str(TARGET), str(DRAFT) if draft else None, **flags)


def together(run: InProcess, ids: list[list[int]], **options: Any) -> list[list[int]]:
    """The answers of requests that run at the same time."""
    reqs = [run.add(prompt, **{**N, **options}) for prompt in ids]
    run.run(*reqs)
    return [list(req.output_ids) for req in reqs]
