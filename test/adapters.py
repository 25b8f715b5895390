"""Small random LoRA adapters."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3ForCausalLM

PROJECTIONS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    *("linear_attn.in_proj_qkvz", "linear_attn.out_proj"),
)
MERGED = {f"linear_attn.in_proj_{part}": "linear_attn.in_proj_qkvz" for part in ("qkv", "z")}


def _projections(target: Path) -> dict[tuple[int, str], list[int]]:
    """The shape of each projection of each layer, merged as in SGLang: outputs, inputs."""
    shapes: dict[tuple[int, str], list[int]] = {}
    with safe_open(target / "model.safetensors", "pt") as file:
        for key in file.keys():  # noqa: SIM118, it is no dict
            found = re.search(r"\blayers\.(\d+)\.(.*)\.weight$", key)
            name = MERGED.get(found[2], found[2]) if found else None
            if found and name in PROJECTIONS:
                out, into = file.get_slice(key).get_shape()
                place = int(found[1]), name
                shapes[place] = [out + shapes.get(place, [0])[0], into]
    return shapes


def adapter_id(engine: Any, name: str | None) -> str | None:
    """The id under which SGLang's HTTP side sends this adapter to an engine's scheduler."""
    known = engine.scheduler.tp_worker.model_runner.lora_manager.lora_refs
    return next((ref.lora_id for ref in known.values() if ref.lora_name == name), None)


def write_adapter(
    path: Path,
    target: Path,
    rank: int,
    vocabulary: tuple[str, ...] = (),
    seed: int = 0,
    strength: float = 0.3,
) -> Path:
    """A LoRA adapter as PEFT writes it, on all linear layers that have one in SGLang.

    vocabulary: "embed_tokens", "lm_head"; strength: 0.3 changes most texts of `write_target`.
    """
    rng = torch.Generator().manual_seed(seed)
    config = json.loads((target / "config.json").read_text())
    config = config.get("text_config", config)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes = _projections(target)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name in PROJECTIONS:
            if (layer, name) not in shapes:
                continue
            out, into = shapes[layer, name]
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            weights[f"{prefix}.lora_A.weight"] = drawn(rank, into) / into**0.5
            weights[f"{prefix}.lora_B.weight"] = strength * drawn(out, rank)
    if "embed_tokens" in vocabulary:
        prefix = "base_model.model.model.embed_tokens"
        weights[f"{prefix}.lora_embedding_A"] = drawn(rank, vocab)
        weights[f"{prefix}.lora_embedding_B"] = strength * drawn(hidden, rank) / 3
    if "lm_head" in vocabulary:
        weights["base_model.model.lm_head.lora_A.weight"] = drawn(rank, hidden) / hidden**0.5
        weights["base_model.model.lm_head.lora_B.weight"] = strength * drawn(vocab, rank)
    names = {name.split(".")[-1] for _, name in shapes}
    peft = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(
        json.dumps(peft | {"target_modules": [*sorted(names), *vocabulary]})
    )
    save_file(weights, path / "adapter_model.safetensors", metadata={"format": "pt"})
    return path


def merged(target: Path, adapter: Path) -> Qwen3ForCausalLM:
    """The target with the adapter in its weights, by Transformers."""
    model = Qwen3ForCausalLM.from_pretrained(target).eval()
    found, state = load_file(adapter / "adapter_model.safetensors"), model.state_dict()
    for name, a in found.items():
        if "lora_A" in name:
            b = found[name.replace("lora_A", "lora_B")]
            key = name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
            state[key] += 2 * b @ a
        if "lora_embedding_A" in name:
            b = found[name.replace("embedding_A", "embedding_B")]
            state["model.embed_tokens.weight"] += 2 * (b @ a).T
    return model


def vocabulary_of(model: Any) -> dict[str, Tensor]:
    """The embedding and the LM head of Transformers' model, by the names of a draft's own."""
    return {
        "embed_tokens.weight": model.get_input_embeddings().weight.detach(),
        "lm_head.weight": model.get_output_embeddings().weight.detach(),
    }
