"""A hybrid target of Qwen3-Next's shape: the bundled one, with gated delta nets (GDN) in it.

`python -m training.hybrid --out DIR` writes it and its draft to DIR/target and DIR/draft. A GDN
replaces the attention of every other layer. All else computes what it computes in the bundled
target. `--work DIR` trains the GDN layers.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from sglang_dflash.tiny import DRAFT, TARGET
from training.export import write_checkpoint
from training.mixers import train_mixers
from training.shapes import HYBRID_CONFIG, is_linear

MIXERS = Path(__file__).with_name("trained") / "hybrid.safetensors"
LAYER_STEPS, STEPS = 300, 360
COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)

Weights = dict[str, Tensor]


def convert(weights: Weights, config: dict[str, Any] = HYBRID_CONFIG) -> Weights:
    """A Qwen3 checkpoint as one of Qwen3-Next, without the attention of its GDN layers."""
    converted = {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    for name, weight in weights.items():
        layer, _, part = name.removeprefix("model.layers.").partition(".")
        if part.startswith("mlp."):
            continue
        if part.startswith("self_attn.") and is_linear(int(layer), config):
            continue
        if name.endswith("norm.weight"):
            converted[name] = weight - 1  # exact in bfloat16 for weights of 0.5 and more
        elif part == "self_attn.q_proj.weight":
            converted[name] = _gated(weight, config["head_dim"])
        elif part == "self_attn.o_proj.weight":
            converted[name] = 2 * weight
        else:
            converted[name] = weight
    for index in range(config["num_hidden_layers"]):
        mlp = f"model.layers.{index}.mlp."
        dense = {part: weights[f"{mlp}{part}_proj.weight"] for part in ("gate", "up", "down")}
        converted |= {mlp + name: weight for name, weight in _sparse(dense, config).items()}
    return converted


def _gated(q_proj: Tensor, head_dim: int) -> Tensor:
    """Behind each head's rows, those of its output gate. They are 0, so the gate is 1/2."""
    heads = q_proj.unflatten(0, (-1, head_dim))
    return torch.cat([heads, torch.zeros_like(heads)], dim=1).flatten(0, 1)


def _sparse(dense: Weights, config: dict[str, Any]) -> Weights:
    """An MLP as experts that are all chosen, and a shared expert. Each one has a slice of it.

    Router and shared gate are 0, so the weight of an expert is 1/count and of the shared one 1/2.
    """
    count, size = config["num_experts"], config["moe_intermediate_size"]
    sizes = [size] * count + [config["shared_expert_intermediate_size"]]
    names = [f"experts.{i}" for i in range(count)] + ["shared_expert"]
    scales = [count] * count + [2]
    hidden = dense["gate"].shape[1]
    sparse = {
        "gate.weight": dense["gate"].new_zeros(count, hidden),
        "shared_expert_gate.weight": dense["gate"].new_zeros(1, hidden),
    }
    slices = zip(*(dense[part].split(sizes) for part in ("gate", "up")), strict=True)
    down = dense["down"].split(sizes, dim=1)
    for name, (gate, up), down_slice, scale in zip(names, slices, down, scales, strict=True):
        sparse[f"{name}.gate_proj.weight"] = gate.contiguous()
        sparse[f"{name}.up_proj.weight"] = up.contiguous()
        sparse[f"{name}.down_proj.weight"] = scale * down_slice
    return sparse


def assemble(folder: Path, mixers: Path = MIXERS, draft: Path = DRAFT) -> tuple[Path, Path]:
    """Write folder/target and folder/draft, and return them. mixers: the tensors of the GDN."""
    weights = convert(load_file(TARGET / "model.safetensors")) | load_file(mixers)
    target = write_target(folder / TARGET.name, weights, HYBRID_CONFIG)
    return target, shutil.copytree(draft, folder / DRAFT.name, dirs_exist_ok=True)


def write_target(out: Path, weights: Weights, config: dict[str, Any]) -> Path:
    """Write a checkpoint with the bundled target's tokenizer to `out`, and return it."""
    out.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        shutil.copyfile(TARGET / name, out / name)
    return write_checkpoint(out, config, weights)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training.hybrid", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, help="where to write the pair")
    where.add_argument("--work", type=Path, help="where to train, resume from, and write the pair")
    parser.add_argument("--layer-steps", type=int, default=LAYER_STEPS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.out is not None:
        print(*assemble(args.out), sep="\n")
        return
    args.work.mkdir(parents=True, exist_ok=True)
    mixers = train_mixers(args.work, args.layer_steps, args.steps, args.device)
    print(*assemble(args.work, mixers), sep="\n")


if __name__ == "__main__":
    main()
