"""The embedding of the mask, from mask_embedding.pt: a tensor, or a dict with one tensor.

`torch.save` writes a zip archive: a pickle, and the values of each tensor in a file of its own. It
is read here without `torch.load`, which believes the sizes that a pickle states. This reader knows
the few operations that describe tensors, and a size is that of the values in the archive.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.checkpoint.fields import CORRECT_CONFIG
from sglang_dflash.checkpoint.files import FETCH_AGAIN, read_file
from sglang_dflash.checkpoint.tensors import MASK_EMBEDDING
from sglang_dflash.errors import Refusal, shown

BYTES_PER_VALUE = 8  # at most
OVERHEAD = 65_536  # bytes of the archive and its pickle
MEMO_LIMIT = 1000  # the unpickler allocates as many entries as a pickle states
OPERATIONS = {
    *("PROTO", "STOP", "MARK", "GLOBAL", "REDUCE", "BINPERSID"),
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "APPEND", "APPENDS"),
    *("BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
}
DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
}
# Errors of a file that is no such archive, or whose pickle describes no tensor.
UNREADABLE = (
    zipfile.BadZipFile,
    pickle.UnpicklingError,
    ValueError,
    TypeError,
    LookupError,
    EOFError,
    OverflowError,
    RuntimeError,
)


def read_mask_embedding(config: DFlashConfig) -> Tensor:
    """The mask's embedding, [hidden_size]. Raises `Refusal`."""
    file = Path(config.path) / MASK_EMBEDDING
    content = read_file(file, OVERHEAD + BYTES_PER_VALUE * config.hidden_size)
    try:
        value = _load(content)
    except UNREADABLE as error:
        reason = f"{type(error).__name__}: {error}"
        raise Refusal(f"The file {file} cannot be read ({reason}).", FETCH_AGAIN) from None
    if isinstance(value, dict):
        stated = value.get("mask_token_id", config.mask_token_id)
        if stated != config.mask_token_id:
            raise Refusal(
                f"The file {file} is for mask {shown(stated)}, the config says "
                f"{config.mask_token_id}.",
                CORRECT_CONFIG,
            )
        if value.get("per_position"):
            raise Refusal(
                f"The file {file} holds an embedding for each position of the block, and no "
                "implementation is known that says how they are used.",
                "Use a draft with one mask embedding.",
            )
        tensors = [entry for entry in value.values() if isinstance(entry, Tensor)]
        value = tensors[0] if len(tensors) == 1 else None
    if not isinstance(value, Tensor) or value.numel() != config.hidden_size:
        raise Refusal(
            f"The file {file} does not hold one tensor of {config.hidden_size} values.", FETCH_AGAIN
        )
    if not bool(torch.isfinite(value).all()):
        raise Refusal(f"The file {file} holds NaN or infinity.", FETCH_AGAIN)
    return value.flatten()


def _load(content: bytes) -> Any:
    """The object that `torch.save` wrote. Raises one of `UNREADABLE`."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        # torch stores values as they are. Compressed ones could be far larger than the file.
        if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
            raise ValueError("its parts are compressed")
        [described] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        pickled = archive.read(described)
        for operation, argument, _ in pickletools.genops(pickled):
            is_memo = operation.name in ("BINPUT", "LONG_BINPUT")
            if operation.name not in OPERATIONS or (is_memo and int(argument or 0) > MEMO_LIMIT):
                raise ValueError(f"{operation.name} describes no tensor")
        return _Reader(pickled, archive, described.removesuffix("data.pkl")).load()


class _Reader(pickle.Unpickler):
    """Makes tensors of a pickle whose operations have been checked. It imports nothing."""

    def __init__(self, pickled: bytes, archive: zipfile.ZipFile, folder: str) -> None:
        super().__init__(io.BytesIO(pickled))
        self._archive, self._folder = archive, folder
        self._values: dict[str, bytearray] = {}  # by names in the archive, each read once

    def find_class(self, module: str, name: str) -> Any:
        """Only the names that describe a tensor mean something."""
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if (module, name) == ("collections", "OrderedDict"):  # a tensor's hooks, which are empty
            return dict
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a tensor")

    def persistent_load(self, pid: Any) -> Tensor:
        """The values of a tensor: ("storage", dtype, name in the archive, device, number)."""
        _, dtype, name, _, _ = pid
        if name not in self._values:
            self._values[name] = bytearray(self._archive.read(f"{self._folder}data/{name}"))
        return torch.frombuffer(self._values[name], dtype=dtype)


def _tensor(values: Tensor, offset: int, size: Any, stride: Any, *_: Any) -> Tensor:
    """As `torch._utils._rebuild_tensor_v2`. torch raises if the view leaves the values."""
    return values.as_strided(size, stride, offset)
