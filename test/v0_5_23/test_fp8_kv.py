"""The target keeps KV in FP8, and the draft does not: answers as without speculation.

Each is asked alone, and is one that the target is sure of: rounding to FP8 can change others.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.tiny import TARGET
from sglang_dflash.tiny.prompts import held_out
from test.servers import ALL_FEATURES, Client, chat, running, without_speculation


def scales(folder: Path) -> tuple[str, str]:
    """A file with a scale for K and V of each layer, as a flag."""
    layers = json.loads((TARGET / "config.json").read_text())["num_hidden_layers"]
    factors: Any = {"0": {str(i): 0.05 + 0.02 * i for i in range(layers)}}
    file = folder / "scales.json"
    schema = {"dtype": "float8_e4m3fn", "scaling_factor": factors}
    file.write_text(json.dumps({"model_type": "qwen3", "kv_cache": schema}))
    return "--quantization-param-path", str(file)


def answers(client: Client) -> list[list[int]]:
    """The answers to word problems and records: their tokens."""
    prompts = [chat(example.prompt) for kind in ("word", "json") for example in held_out(kind, 4)]
    return [client.generate(prompt, max_new_tokens=60)["output_ids"] for prompt in prompts]


@pytest.mark.parametrize("scaled", [False, True])
def test_fp8_kv(tmp_path: Path, scaled: bool) -> None:
    flags = ("--kv-cache-dtype", "fp8_e4m3", *(scales(tmp_path) if scaled else ()))
    with without_speculation(*flags) as plain:
        expected = answers(plain)
    with running(*ALL_FEATURES, *flags, dflash=True) as server:
        assert answers(server) == expected
        log = server.server.log.read_text()
    kept = re.findall(r"KV Cache is allocated. dtype: (\S+),", log)
    assert kept == ["torch.float8_e4m3fn", "torch.float32"]
