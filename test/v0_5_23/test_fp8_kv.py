"""The target keeps KV in FP8, and the draft does not: answers as without speculation."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.tiny import TARGET
from test.differential.ask import compare
from test.precision import ROUNDED_KV
from test.servers import ALL_FEATURES, running, without_speculation


def scales(folder: Path) -> tuple[str, str]:
    """A file with a scale for K and V of each layer, as a flag."""
    layers = json.loads((TARGET / "config.json").read_text())["num_hidden_layers"]
    factors: Any = {"0": {str(i): 0.05 + 0.02 * i for i in range(layers)}}
    file = folder / "scales.json"
    schema = {"dtype": "float8_e4m3fn", "scaling_factor": factors}
    file.write_text(json.dumps({"model_type": "qwen3", "kv_cache": schema}))
    return "--quantization-param-path", str(file)


@pytest.mark.parametrize("scaled", [False, True])
def test_fp8_kv(tmp_path: Path, scaled: bool) -> None:
    flags = ("--kv-cache-dtype", "fp8_e4m3", *(scales(tmp_path) if scaled else ()))
    ours = running(*ALL_FEATURES, *flags, dflash=True)
    with without_speculation(*flags) as plain, ours as server:
        report = compare(51, range(20), plain.url, server.url, ROUNDED_KV)
        log = server.server.log.read_text()
    assert report.compared == 20
    assert [found for _, found in report.differing] == []
    kept = re.findall(r"KV Cache is allocated. dtype: (\S+),", log)
    assert kept == ["torch.float8_e4m3fn", "torch.float32"]
