"""A real server of every draft format: text and number of steps are the plain reference's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
import requests
import torch
from transformers import Qwen3ForCausalLM

from sglang_dflash.tools.launch import Server
from test.checkpoints import prompt
from test.formats import (
    Case,
    deepspec,
    dflash2,
    domino,
    dspine,
    lilicorr,
    nemo,
    specforge,
    speculators,
    write,
    zlab,
)
from test.reference import Semantics, draft_block
from test.servers import STRICT

FLAGS = ["--dtype", "float32", "--max-total-tokens", "2048", "--max-running-requests", "4"]
TOKENS = 80
Reading: TypeAlias = tuple[Semantics, dict[str, torch.Tensor]]  # and the weights to read
FORMATS: dict[str, Callable[[], Case]] = {
    "z-lab": zlab,
    "SpecForge": specforge,
    "NeMo": lambda: nemo(causal=True),
    "speculators": lambda: speculators(draft_vocab=64),
    "speculators as --model-path": lambda: speculators(sample_from_anchor=True),
    "DSpark": lambda: deepspec("rnn"),
    "DFlash 2": dflash2,
    "Domino": domino,
    "DSpine": dspine,
    "LiLiCorr": lilicorr,
}


def greedy(model: Qwen3ForCausalLM, ids: list[int]) -> list[int]:
    """Transformers' own continuation, end tokens included as any other."""
    output = model.generate(
        torch.tensor([ids]), do_sample=False, max_new_tokens=TOKENS, eos_token_id=-1, pad_token_id=0
    )
    continuation: list[int] = output[0, len(ids) :].tolist()
    return continuation


def steps_of(
    model: Qwen3ForCausalLM,
    semantics: Semantics,
    weights: dict[str, torch.Tensor],
    ids: list[int],
    text: list[int],
) -> int:
    """Verify steps that the reference's drafts need; prefill gives the first token."""
    done = steps = 0
    while done < len(text) - 1:
        done += 1
        steps += 1
        for draft in draft_block(model, semantics, weights, ids + text[:done]):
            if done == len(text) - 1 or draft != text[done]:
                break
            done += 1
    return steps


@pytest.fixture(params=FORMATS)
def served(
    request: pytest.FixtureRequest, small: Path, tmp_path: Path
) -> Iterator[tuple[Server, Reading]]:
    config, weights, semantics = FORMATS[request.param]()
    flags = ["--model-path", str(small / "target"), "--speculative-algorithm", "DFLASH"]
    if request.param == "speculators as --model-path":
        semantics.sample_from_anchor = True
        config["speculators_config"]["verifier"]["name_or_path"] = str(small / "target")
        flags = ["--model-path", str(write(tmp_path, config, weights))]
    else:
        flags += ["--speculative-draft-model-path", str(write(tmp_path, config, weights))]
    with Server([*flags, *FLAGS, "--sleep-on-idle"], STRICT) as server:
        yield server, (semantics, weights)


@pytest.mark.full  # test_formats.py reads all formats in the process of a test
def test_server_of_a_format(served: tuple[Server, Reading], small: Path) -> None:
    server, (semantics, weights) = served
    model = Qwen3ForCausalLM.from_pretrained(small / "target", dtype=torch.float32).eval()
    for seed in (1, 2):
        ids = prompt(seed, 20)
        text = greedy(model, ids)
        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        answer = requests.post(
            f"{server.url}/generate",
            json={"input_ids": ids, "sampling_params": sampling},
            timeout=300,
        ).json()
        assert answer["output_ids"] == text
        steps = steps_of(model, semantics, weights, ids, text)
        assert answer["meta_info"]["spec_verify_ct"] == steps
