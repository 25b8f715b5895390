"""The tensors of a checkpoint: names and shapes from file headers, and whether all are finite."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from sglang_dflash.checkpoint.config import DFlashConfig, Shape
from sglang_dflash.checkpoint.fields import Object, Place
from sglang_dflash.checkpoint.files import (
    FETCH_AGAIN,
    JSON_LIMIT,
    MB,
    OTHER_CHECKPOINT,
    open_file,
    read_json,
)
from sglang_dflash.errors import Refusal, shown

FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
# Tensors of other kinds than floating ones.
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {"d2t": ("an integer", ("I64", "I32"))}
BOOLEAN: tuple[str, tuple[str, ...]] = ("a boolean", ("BOOL",))
INDEX = "model.safetensors.index.json"
HEADER_LIMIT = 16 * MB  # bytes of one file, 100,000 tensors; its parser takes up to 22 times more
VALUES_AT_ONCE = 2**24
TENSOR_LIMIT = 500_000  # of all files; the largest targets have 210,000
PACKED_VALUES = 16  # the most values in one entry of a quantised tensor: 2 bits each in an int32
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
MASK_EMBEDDING = "mask_embedding.pt"
# Tables of RoPE that some exporters save. A model makes its own from the config.
ROPE_TABLE = re.compile(r"(^|\.)rotary_emb(_local)?\.\w*(inv_freq|cos_cached|sin_cached)$")


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
        """The first dimension of a tensor. None if there is no such tensor. Raises `Refusal`."""
        if name not in self.found:
            return None
        _, shape = self.found[name]
        if not shape or not shape[0]:
            raise Refusal(f"The tensor {name} in {self.folder} has no rows.", FETCH_AGAIN)
        return shape[0]

    def has_mask_embedding(self) -> bool:
        """Whether there is a file of the mask's embedding. Raises `Refusal` if it is no file."""
        file = self.folder / MASK_EMBEDDING
        if not os.path.lexists(file):
            return False
        open_file(file).close()
        return True

    @property
    def parameters(self) -> int:
        """Number of values in all tensors."""
        return sum(math.prod(shape) for _, shape in self.found.values())


def is_rope_table(name: str) -> bool:
    """Whether a tensor of a checkpoint is skipped, as the loaders of all models do."""
    return ROPE_TABLE.search(name) is not None


def read_headers(folder: Path, rename: Callable[[str], str]) -> Tensors:
    """Read the headers of a folder's weights.

    rename: from the checkpoint's name of a tensor to the model's. Raises `Refusal` for a broken
    file, for one that the index names and the folder does not hold, and for pickles.
    """
    found: dict[str, tuple[str, Shape]] = {}
    for file in weight_files(folder):
        for name, entry in _header(file).items():
            own = rename(name)
            if own in found:
                raise Refusal(f"The folder {folder} holds the tensor {own} twice.", FETCH_AGAIN)
            found[own] = entry
        if len(found) > TENSOR_LIMIT:
            raise Refusal(
                f"The folder {folder} holds more than {TENSOR_LIMIT:,} tensors.", OTHER_CHECKPOINT
            )
    return Tensors(folder, found)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold a folder's weights. SGLang loads the same ones.

    They are those that the index names, or all if there is no index. Raises `Refusal`. An index
    names files of its own folder only, so no path leads out of it.
    """
    present = _visible(folder, "*.safetensors")
    pickles = {name for pattern in PICKLES for name in _visible(folder, pattern)}
    pickled = sorted(pickles - {MASK_EMBEDDING})
    if pickled and not present:
        raise Refusal(
            f"The folder {folder} holds its weights as pickles ({shown(pickled)}), which can run "
            "any code when they are opened.",
            "Convert them to safetensors, or use another checkpoint.",
        )
    index = folder / INDEX
    if not os.path.lexists(index):
        return [present[name] for name in sorted(present)]
    names = set()
    files = Place(read_json(index, JSON_LIMIT), str(index)).one("weight_map", Object, {})
    for name in files.values():
        if not isinstance(name, str) or name not in present:
            raise Refusal(
                f"The file {index} names {shown(name)}, which is missing in its folder.",
                FETCH_AGAIN,
            )
        names.add(name)
    return [present[name] for name in sorted(names)]


def _visible(folder: Path, pattern: str) -> dict[str, Path]:
    """The files of a pattern by their names. As for SGLang, a dot hides a file."""
    return {file.name: file for file in folder.glob(pattern) if not file.name.startswith(".")}


def _header(file: Path) -> dict[str, tuple[str, Shape]]:
    """Dtype and shape of each tensor of a safetensors file that is loaded. Raises `Refusal`.

    The library that will load the weights parses the header. It checks that the tensors have the
    sizes of their shapes and fill the file to its end.
    """
    with open_file(file) as stream:
        length = int.from_bytes(stream.read(8), "little")
    if length > HEADER_LIMIT:
        raise Refusal(
            f"The file {file} is not a safetensors file, or its header has more than "
            f"{HEADER_LIMIT:,} bytes.",
            FETCH_AGAIN,
        )
    header = {}
    with _weights(file, "numpy") as weights:
        for name in weights.keys():  # noqa: SIM118 - no mapping
            if is_rope_table(name):
                continue
            part = weights.get_slice(name)
            header[name] = (part.get_dtype(), tuple(part.get_shape()))
    return header


def stored_tensors(file: Path) -> Iterator[tuple[str, Any]]:
    """Name and value of each tensor of a file that is loaded, one at a time, on the CPU.

    Raises `Refusal`.
    """
    with _weights(file, "pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - no mapping
            if not is_rope_table(name):
                yield name, weights.get_tensor(name)


def check_values(folder: Path, marks: tuple[str, ...] = ()) -> None:
    """Raise `Refusal` for NaN or infinity in a folder's weights, and for a mark that is false.

    marks: names of `Family.marks`. The headers have been read.
    """
    for file in weight_files(folder):
        for name, tensor in stored_tensors(file):
            check_value(name, tensor, marks, f"The file {file} holds", FETCH_AGAIN)


def check_value(name: str, tensor: Any, marks: tuple[str, ...], holder: str, fix: str) -> None:
    """Raise `Refusal` for NaN or infinity in a tensor, or if it is a mark that is false.

    holder: how the sentence begins, such as "The file ... holds".
    """
    import torch  # headers need none

    if name.removeprefix("model.") in marks and not tensor.all():
        raise Refusal(f"{holder} {name} = false: it was saved before it was ready.", fix)
    # Few values at a time are copied, because the tensor may be large.
    for part in tensor.flatten().split(VALUES_AT_ONCE):
        if not torch.isfinite(part.float()).all():
            raise Refusal(f"{holder} NaN or infinity in {name}.", fix)


@contextlib.contextmanager
def _weights(file: Path, framework: str) -> Iterator[Any]:
    """Open a safetensors file with the library that will load it. Raises `Refusal`."""
    try:
        with safe_open(file, framework=framework) as weights:
            yield weights
    except (SafetensorError, OSError) as error:
        raise Refusal(
            f"The file {file} is not a complete safetensors file (truncated?): {error}.",
            FETCH_AGAIN,
        ) from None


def expected_tensors(config: DFlashConfig) -> dict[str, Shape]:
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
        shapes["d2t"] = (config.columns,)
    for layer in range(config.num_layers):
        for name, shape in _expected_in_layer(config).items():
            shapes[f"layers.{layer}.{name}"] = shape
    return shapes | config.family.shapes(config)


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
    return shapes | config.family.shapes_in_layer(config)


def faults(config: DFlashConfig, tensors: Tensors) -> list[str]:
    """Every tensor that is missing, unexpected, or of another shape or kind than the config says.

    Each entry is part of a sentence. The list is empty if all fit. So a model of the config takes
    as much memory as its files, whatever sizes the config states. Names and shapes of quantised
    tensors depend on the method, so for these only the number of values is compared. For a
    checkpoint without weights the list is empty, too.
    """
    if not tensors.known:
        return []
    wanted = expected_tensors(config)
    if config.quantization is not None:
        return _too_many_values(wanted, tensors)
    optional: dict[str, Shape] = dict.fromkeys(config.family.marks, ())
    if config.vocabulary_map:
        optional["t2d"] = (config.vocab_size,)
    missing, unexpected, mismatched = [], [], []
    for name in tensors.found:
        if name not in wanted and name not in optional:
            unexpected.append(f"unexpected {name}")
    wanted |= {name: shape for name, shape in optional.items() if name in tensors}
    for name, shape in wanted.items():
        if name not in tensors:
            missing.append(f"missing {name}")
            continue
        dtype, stored = tensors.found[name]
        kind, dtypes = BOOLEAN if name in optional else KINDS.get(name, ("a floating", FLOATS))
        if stored != shape:
            mismatched.append(f"{name} has shape {shown(list(stored))}, not {list(shape)}")
        elif dtype not in dtypes:
            mismatched.append(f"{name} has dtype {dtype}, not {kind} one")
    return missing + unexpected + mismatched


def _too_many_values(wanted: dict[str, Shape], tensors: Tensors) -> list[str]:
    """A sentence's part if quantised tensors cannot hold the values that a config describes."""
    described = sum(map(math.prod, wanted.values()))
    if described <= PACKED_VALUES * tensors.parameters:
        return []
    return [f"the config describes {described:,} values, the files hold {tensors.parameters:,}"]
