"""What a window of each position costs a draft that was trained with a window of the anchor.

A GPU's backends have the former only. A CPU computes both, so acceptance can be compared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from sglang_dflash.settings.options import VERIFY_WIDTH
from sglang_dflash.tiny import DRAFT, TARGET
from sglang_dflash.tiny.prompts import IN_ORDER, KINDS, held_out
from test.checkpoints import write_draft
from test.inprocess import InProcess
from test.servers import chat

LOSS = 0.01  # of the accept length
EACH = 30  # prompts of a kind
END = 2  # the token that ends an answer


def prompt_ids() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    found: list[list[int]] = []
    for kind in KINDS:
        for example in held_out(kind, EACH, IN_ORDER):
            text = example.prompt if kind == "code" else chat(example.prompt)
            found.append(tokenizer.encode(text))
    return found


def windowed(folder: Path, window: int, anchored: bool) -> Path:
    """The bundled draft, all of its layers with windows that are not causal."""
    config = json.loads((DRAFT / "config.json").read_text())
    body = {key: value for key, value in config.items() if key not in ("dflash_config", "dtype")}
    body |= {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": True}
    method = config["dflash_config"]
    if anchored:
        wanted: dict[str, Any] = {
            "speculators_model_type": "dflash",
            "transformer_layer_config": body | {"sliding_window": window},
            "draft_vocab_size": config["vocab_size"],
            "block_size": config["block_size"],
            "aux_hidden_state_layer_ids": [k + 1 for k in method["target_layer_ids"]],
            "mask_token_id": method["mask_token_id"],
            "sliding_window_non_causal": True,
        }
    else:  # as `LayerAttention.left` has it
        wanted = config | body | {"sliding_window": window + 1, "is_causal": False}
    return write_draft(folder, wanted, load_file(DRAFT / "model.safetensors"))


def accept_length(draft: Path, prompts: list[list[int]]) -> float:
    with InProcess(
        str(TARGET), str(draft), max_running_requests=16, max_total_tokens=16384
    ) as engine:
        reqs = [engine.add(ids, max_new_tokens=160, eos=END) for ids in prompts]
        engine.run(*reqs, limit=20_000)
    tokens = sum(len(req.output_ids) - 1 for req in reqs)
    steps: int = sum(req.spec_verify_ct for req in reqs)
    return tokens / steps


@pytest.mark.full
@pytest.mark.parametrize("window", [64, 128])
def test_a_window_of_each_position_costs_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    monkeypatch.setenv(VERIFY_WIDTH, "full")
    prompts = prompt_ids()
    anchored, each = (
        accept_length(windowed(tmp_path / str(anchored), window, anchored), prompts)
        for anchored in (True, False)
    )
    print(f"window {window}: accept length {anchored:.3f} by the anchor, {each:.3f} by position")
    assert each > (1 - LOSS) * anchored
