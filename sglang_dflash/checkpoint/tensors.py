"""Names, dtypes and shapes of a checkpoint's tensors, from file headers. No weight is read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.checkpoint.fields import Fields
from sglang_dflash.checkpoint.files import FETCH_AGAIN, parse_object, read_json
from sglang_dflash.errors import Refusal

FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
INTEGERS = ("I64", "I32")
HEADER_LIMIT = 100_000_000  # bytes; safetensors' own bound
HEADER_FIELDS = {"dtype", "shape", "data_offsets"}  # a header has them for each tensor
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Tensors:
    """The tensors of a folder, by the model's own names. Empty if the folder holds no weights."""

    folder: Path
    found: dict[str, tuple[str, Shape]] = field(default_factory=dict)  # dtype and shape of each

    @property
    def known(self) -> bool:
        return bool(self.found)

    def __contains__(self, name: str) -> bool:
        return name in self.found

    def rows(self, name: str) -> int | None:
        """The first dimension of a tensor. None if there is no such tensor."""
        if name not in self.found:
            return None
        _, shape = self.found[name]
        return shape[0]

    def has_file(self, name: str) -> bool:
        return (self.folder / name).is_file()

    @property
    def parameters(self) -> int:
        """Number of values in all tensors."""
        return sum(math.prod(shape) for _, shape in self.found.values())


def read_headers(folder: Path, rename: Callable[[str], str]) -> Tensors:
    """Read the header of every safetensors file of a folder.

    rename: from the checkpoint's name of a tensor to the model's. Raises `Refusal` for a broken
    file, and for a file that the index names and the folder does not hold.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = Fields(read_json(index), str(index)).section("weight_map").raw.values()
        for name in sorted(set(files)):
            if not (folder / name).is_file():
                raise Refusal(f"The file {index} names {name}, which is missing.", FETCH_AGAIN)
    found: dict[str, tuple[str, Shape]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, entry in _header(file).items():
            found[rename(name)] = (entry["dtype"], tuple(entry["shape"]))
    return Tensors(folder, found)


def _header(file: Path) -> dict[str, Any]:
    """The header of a safetensors file: name -> dtype, shape and data_offsets.

    Raises `Refusal` unless the tensors fill the file to its end.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(HEADER_LIMIT, size - 8):
            raise _broken(file)
        header = parse_object(stream.read(length), file)
    header.pop("__metadata__", None)
    end = 0  # the last tensor's, in bytes behind the header
    for entry in header.values():
        if not isinstance(entry, dict) or not entry.keys() >= HEADER_FIELDS:
            raise _broken(file)
        end = max(end, entry["data_offsets"][1])
    if 8 + length + end != size:
        raise _broken(file)
    return header


def _broken(file: Path) -> Refusal:
    return Refusal(f"The file {file} is not a complete safetensors file (truncated?).", FETCH_AGAIN)


def expected(config: DFlashConfig) -> dict[str, Shape]:
    """Name and shape of every tensor of an unquantised draft of this config."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * config.target_hidden_size),
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
        for name, shape in _expected_in_layer(config).items():
            shapes[f"layers.{layer}.{name}"] = shape
    return shapes | _expected_in_heads(config)


def _expected_in_heads(config: DFlashConfig) -> dict[str, Shape]:
    """Name and shape of every tensor of the heads that choose and weigh drafts."""
    shapes: dict[str, Shape] = {}
    if config.selector is not None:
        codebook = (config.vocab_size, config.selector.rank)
        shapes["candidate_selector.predecessor_codebook"] = codebook
        shapes["candidate_selector.successor_codebook"] = codebook
        projection = (config.selector.rank, config.hidden_size)
        shapes["candidate_selector.hidden_projection.weight"] = projection
    hidden, rank = config.hidden_size, 0
    columns = config.draft_vocab_size or config.vocab_size
    if config.markov is not None:
        rank = config.markov.rank
        shapes["markov_head.markov_w1.weight"] = (config.vocab_size, rank)
        shapes["markov_head.markov_w2.weight"] = (columns, rank)
        if config.markov.kind == "gated":
            shapes["markov_head.gate_proj.weight"] = (rank, hidden + rank)
            shapes["markov_head.gate_proj.bias"] = (rank,)
        elif config.markov.kind == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
            shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if config.confidence is not None:
        inputs = hidden + (rank if config.confidence.with_markov else 0)
        shapes["confidence_head.proj.weight"] = (1, inputs)
        shapes["confidence_head.proj.bias"] = (1,)
    if config.prefix_gru is not None:
        inner, state = config.prefix_gru.emb_dim, config.prefix_gru.gru_hidden_dim
        shapes["prefix_gru.weight_ih_l0"] = (3 * state, hidden)
        shapes["prefix_gru.weight_hh_l0"] = (3 * state, state)
        shapes["embed_proj.0.weight"] = (inner, hidden + state)
        shapes["embed_proj.2.weight"] = (columns, inner)
    return shapes


def _expected_in_layer(config: DFlashConfig) -> dict[str, Shape]:
    """Name, without the layer's prefix, and shape of every tensor of one layer."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * dim, config.num_kv_heads * dim
    shapes: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.attention_bias:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            outputs = shapes[f"self_attn.{name}.weight"][0]
            shapes[f"self_attn.{name}.bias"] = (outputs,)
    if config.convolution is not None:
        taps, groups = config.convolution.taps, hidden // config.convolution.group
        for name in ("attention_conv", "mlp_conv"):
            shapes[f"{name}.base_kernel"] = (2, taps, hidden)
            shapes[f"{name}.kernel_projection.weight"] = (2 * taps * groups, hidden)
    return shapes


def faults(config: DFlashConfig, tensors: Tensors) -> list[str]:
    """Every tensor that is missing, unexpected, or of another shape or kind than the config says.

    Each entry is part of a sentence. The list is empty if all fit, and for checkpoints without
    weights or with quantised ones, whose names and shapes depend on the method.
    """
    if not tensors.known or config.quantization is not None:
        return []
    wanted = expected(config)
    optional = {"t2d"} if config.vocabulary_map else set()
    missing, unexpected, mismatched = [], [], []
    for name in tensors.found:
        if name not in wanted and name not in optional:
            unexpected.append(f"unexpected {name}")
    for name, shape in wanted.items():
        if name not in tensors:
            missing.append(f"missing {name}")
            continue
        dtype, stored = tensors.found[name]
        kind, dtypes = ("an integer", INTEGERS) if name == "d2t" else ("a floating", FLOATS)
        if stored != shape:
            mismatched.append(f"{name} has shape {list(stored)}, not {list(shape)}")
        elif dtype not in dtypes:
            mismatched.append(f"{name} has dtype {dtype}, not {kind} one")
    return missing + unexpected + mismatched
