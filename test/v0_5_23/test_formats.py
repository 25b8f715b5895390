"""Every format and feature: the drafts that a server reports are those of an independent reading.

The cases are those of `test/worker/test_formats.py`. SGLang's own worker verifies as many positions
as the draft reads, so of a draft that predicts from the anchor, the last one is not verified.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import requests
import torch
from transformers import Qwen3ForCausalLM

from test.formats import CASES, by_own_names, write
from test.reference import draft_block
from test.servers import running

FLAGS = ("--max-total-tokens", "2048", "--max-running-requests", "4")
PROMPT = random.Random(31).choices(range(5, 140), k=40)
TOKENS = 48  # SGLang reports the last 64 steps
SOME = {
    "zlab sliding",
    "zlab causal",
    "zlab last layer",
    "zlab yarn by type",
    "JetSpec",
    "NeMo",
    "speculators sample_from_anchor",
    "speculators draft vocabulary",
    "speculators sliding not causal",
    "DeepSpec rnn",
    "Domino shifted, pure 1",
    "DFlash 2 sliding, cap, scale",
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.ci if case in SOME else pytest.mark.full)
        for case in CASES
    ],
)
def test_drafts_equal_the_reference(case: str, small: Path, tmp_path: Path) -> None:
    config, weights, semantics = CASES[case]()
    draft = write(tmp_path, config, weights)
    pair = ("--model-path", str(small / "target"), "--speculative-draft-model-path", str(draft))
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    sampling["custom_params"] = {"spec_steps": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    with running(*pair, *FLAGS, dflash=True) as server:
        answer = requests.post(f"{server.url}/generate", json=body, timeout=300).json()
    output, meta = answer["output_ids"], answer["meta_info"]
    model = Qwen3ForCausalLM.from_pretrained(small / "target", dtype=torch.float32).eval()
    own = by_own_names(weights)
    assert len(meta["spec_steps"]) == meta["spec_verify_ct"] > 10
    for step in meta["spec_steps"]:
        wanted = draft_block(model, semantics, own, PROMPT + output[: step["place"]])
        assert step["drafts"] == wanted[: len(step["drafts"])]
        assert len(wanted) - len(step["drafts"]) == semantics.sample_from_anchor
    ends = [step["place"] + step["num_committed"] for step in meta["spec_steps"]]
    assert [1, *ends] == [*(step["place"] for step in meta["spec_steps"]), TOKENS]
