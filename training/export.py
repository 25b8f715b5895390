"""Stage export: weights and held-out prompts into the package. Checkpoints are written here."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from sglang_dflash.tiny import DRAFT, TARGET
from sglang_dflash.tiny.prompts import IN_ORDER, KINDS, PROMPTS, Example
from training import data

FILES = {
    TARGET: (
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ),
    DRAFT: ("config.json", "model.safetensors"),
}
POOL = 256  # prompts of a kind; for code, as many as exist
MEASURED = 11  # prompts of a kind in most of the published results


def export(work: Path) -> None:
    """Copy the files that a server needs, and write the prompts."""
    for folder, names in FILES.items():
        folder.mkdir(exist_ok=True)
        for name in names:
            if (work / folder.name / name).exists():
                shutil.copyfile(work / folder.name / name, folder / name)
    serve_older_transformers(TARGET)
    write_prompts(PROMPTS)


def serve_older_transformers(target: Path) -> None:
    """Add what Transformers 4 reads. Without it, that uses another RoPE and finds no tokenizer."""
    config = json.loads((target / "config.json").read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tokenizer = json.loads((target / "tokenizer_config.json").read_text())
    tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    (target / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2) + "\n")


def write_checkpoint(out: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    """Write config.json and the weights to the folder `out`, and return it."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


def write_prompts(path: Path) -> None:
    """Write the pool of held-out prompts, one JSON object per line, kind after kind."""
    with path.open("w", encoding="utf-8") as file:
        for kind in KINDS:
            for example in _pool(kind):
                file.write(json.dumps(asdict(example)) + "\n")


def _pool(kind: str) -> list[Example]:
    """Held-out prompts of a kind, none twice. Those of published results come first.

    For code, a draw of many does not begin with a draw of few, so the few are drawn separately.
    """
    few = data.draw_held_out(kind, MEASURED, IN_ORDER)
    many = data.draw_held_out(kind, POOL, IN_ORDER)
    found: dict[str, Example] = {}
    for example in few + many:
        found.setdefault(example.prompt, example)
    if kind == "code":
        return [replace(example, answer="") for example in found.values()]
    return list(found.values())
