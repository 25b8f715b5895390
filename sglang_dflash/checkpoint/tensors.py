"""What a checkpoint's files hold, from their headers alone; no weight is read."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_dflash.config import DFlashConfig
from sglang_dflash.errors import Refusal

FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
HEADER_LIMIT = 100_000_000  # bytes; safetensors' own bound


@dataclass(frozen=True)
class Tensors:
    """Tensors of a folder by the model's own names. `known` is False where it holds no weights."""

    folder: Path
    found: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)  # dtype, shape

    @property
    def known(self) -> bool:
        return bool(self.found)

    def __contains__(self, name: str) -> bool:
        return name in self.found

    def rows(self, name: str) -> int | None:
        return self.found[name][1][0] if name in self.found else None

    def has_file(self, name: str) -> bool:
        return (self.folder / name).is_file()

    @property
    def parameters(self) -> int:
        """Values in all tensors."""
        total = 0
        for _, shape in self.found.values():
            count = 1
            for size in shape:
                count *= size
            total += count
        return total


def read_headers(folder: Path, rename: Any) -> Tensors:
    """Headers of every safetensors file of a folder; raises `Refusal` for a broken one."""
    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    if index.is_file():
        shards = _json(index.read_bytes(), index).get("weight_map", {})
        for shard in sorted(set(shards.values())):
            if not (folder / shard).is_file():
                raise Refusal(f"{index} names {shard}, which is missing: fetch the draft again.")
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in files:
        for name, entry in _header(file).items():
            found[rename(name)] = (entry["dtype"], tuple(entry["shape"]))
    return Tensors(folder, found)


def _json(text: bytes, where: Path) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        raise Refusal(f"{where} cannot be read as JSON: fetch the draft again.") from None
    if not isinstance(value, dict):
        raise Refusal(f"{where} is not a JSON object: fetch the draft again.")
    return value


def _header(file: Path) -> dict[str, Any]:
    """The safetensors header, checked against the file's length."""
    broken = Refusal(f"{file} is no whole safetensors file (truncated?): fetch the draft again.")
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(HEADER_LIMIT, size - 8):
            raise broken
        header = _json(stream.read(length), file)
    header.pop("__metadata__", None)
    for entry in header.values():
        if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
            raise broken
    if 8 + length + max((e["data_offsets"][1] for e in header.values()), default=0) != size:
        raise broken
    return header


def expected(config: DFlashConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that an unquantised draft of this config holds."""
    hidden, dim = config.hidden_size, config.head_dim
    queries, keys = config.num_heads * dim, config.num_kv_heads * dim
    features = len(config.target_layer_ids) * config.target_hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, features),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    if config.own_embedding:
        shapes["embed_tokens.weight"] = (config.vocab_size, hidden)
    if config.draft_vocab_size is not None:
        shapes["lm_head.weight"] = (config.draft_vocab_size, hidden)
    if config.vocabulary_map:
        shapes["d2t"] = (config.draft_vocab_size or config.vocab_size,)
    for layer in range(config.num_layers):
        block: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_norm.weight": (dim,),
            "self_attn.k_norm.weight": (dim,),
            "mlp.gate_proj.weight": (config.intermediate_size, hidden),
            "mlp.up_proj.weight": (config.intermediate_size, hidden),
            "mlp.down_proj.weight": (hidden, config.intermediate_size),
        }
        for name, out, into in (
            ("q", queries, hidden),
            ("k", keys, hidden),
            ("v", keys, hidden),
            ("o", hidden, queries),
        ):
            block[f"self_attn.{name}_proj.weight"] = (out, into)
            if config.attention_bias:
                block[f"self_attn.{name}_proj.bias"] = (out,)
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in block.items()}
    return shapes


def faults(config: DFlashConfig, tensors: Tensors) -> list[str]:
    """What is missing, unexpected, or of another shape or kind; empty if all fits."""
    if not tensors.known or config.quantization is not None:
        return []
    wanted = expected(config)
    maps = {"t2d"} if config.vocabulary_map else set()
    found = [f"missing {name}" for name in wanted if name not in tensors]
    found += [f"unexpected {name}" for name in tensors.found if name not in wanted.keys() | maps]
    for name, shape in wanted.items():
        if name in tensors:
            dtype, has = tensors.found[name]
            if has != shape:
                found.append(f"{name} has shape {list(has)}, not {list(shape)}")
            elif name != "d2t" and dtype not in FLOATS:
                found.append(f"{name} has dtype {dtype}, not a floating one")
            elif name == "d2t" and dtype not in ("I64", "I32"):
                found.append(f"{name} has dtype {dtype}, not an integer one")
    return found
