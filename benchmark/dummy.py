"""Configs of a Qwen3-8B-shaped target and its block-16 draft, for `--load-format dummy`.

The weights are then random, so acceptance must be simulated. The time of a step does not need more.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from sglang_dflash.tiny import TARGET

SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
COMMON: dict[str, Any] = {
    "model_type": "qwen3",
    "attention_bias": False,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
TARGET_LAYERS, DRAFT_LAYERS, BLOCK_SIZE, MASK_TOKEN = 36, 5, 16, 151669
TARGET_LAYER_IDS = [1, 9, 17, 25, 33]
TOKENIZER = ("tokenizer_config.json", "chat_template.jinja")


def configs(layers: int, width_divisor: int) -> dict[str, dict[str, Any]]:
    """`config.json` of "target" and "draft". Fewer layers or less width make both smaller."""
    shape: dict[str, Any] = {**COMMON, **SHAPE}
    shape["hidden_size"] //= width_divisor
    shape["intermediate_size"] //= width_divisor
    shape["num_attention_heads"] = max(8, shape["num_attention_heads"] // width_divisor)
    ids = [i for i in TARGET_LAYER_IDS if i < layers - 1]  # the built-in cannot read the last layer
    target = {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": layers, **shape}
    draft = {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": min(DRAFT_LAYERS, layers),
        "num_target_layers": layers,
        "block_size": BLOCK_SIZE,
        "layer_types": ["full_attention"] * min(DRAFT_LAYERS, layers),
        "dflash_config": {"target_layer_ids": ids, "mask_token_id": MASK_TOKEN},
        **shape,
    }
    return {"target": target, "draft": draft}


def tokenizer() -> dict[str, Any]:
    """The bundled tokenizer, with words for the other ids, because random weights draw any id."""
    found: dict[str, Any] = json.loads((TARGET / "tokenizer.json").read_text())
    words = found["model"]["vocab"]
    known = set(words.values()) | {token["id"] for token in found["added_tokens"]}
    words |= {f"Ġt{i}": i for i in range(SHAPE["vocab_size"]) if i not in known}
    return found


def write(out: Path, layers: int = TARGET_LAYERS, width_divisor: int = 1) -> None:
    """Both folders under `out`, each with a tokenizer."""
    for name, config in configs(layers, width_divisor).items():
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer()))
        for file in TOKENIZER:
            shutil.copy(TARGET / file, folder)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.dummy", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--layers", type=int, default=TARGET_LAYERS, help="of the target, at least 3"
    )
    parser.add_argument("--narrower", type=int, default=1, metavar="N", help="divide the width")
    args = parser.parse_args(argv)
    write(args.out, args.layers, args.narrower)
    print(f"{args.out}/target {args.out}/draft")
    return 0


if __name__ == "__main__":
    sys.exit(main())
