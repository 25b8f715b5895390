"""Memory of the simulated GPU: host memory whose storage is marked, and the rules for its use.

Every operation of torch goes through `DeviceMode`. The rules follow CUDA: host and device tensors
cannot be mixed, a read by the host makes the host wait, and a non-blocking copy arrives only after
the host has waited for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
aten = torch.ops.aten

# Calls whose result has a shape that depends on values, which the host must know.
OF_VALUES = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"}
OF_VALUES |= {"_local_scalar_dense", "equal", "is_nonzero"}
# Calls that accept host tensors beside device tensors: torch copies them to the device.
TAKE_INDICES = {"index", "index_put_", "index_put", "_index_put_impl_"}
BETWEEN = {"transfer_kv_direct", "transfer_kv_per_layer_direct_pf_lf"}  # host and device
BETWEEN |= {"transfer_kv_all_layer_direct_lf_pf"}
NO_KERNEL = {"detach", "alias", "lift_fresh", "empty", "empty_like", "new_empty", "empty_strided"}
NO_KERNEL |= {"new_empty_strided", "set_", "resize_", "_has_compatible_shallow_copy_type"}


class DeviceError(RuntimeError):
    """An operation that CUDA, or torch on CUDA, would refuse."""


@dataclass
class Log:
    """The work that the device got since the log was last cleared."""

    launches: list[str] = field(default_factory=list)  # of kernels, outside graphs
    copies: list[str] = field(default_factory=list)  # between host and device, and on it
    replays: int = 0
    waits: list[str] = field(default_factory=list)  # who waited, and by what

    def clear(self) -> None:
        self.launches.clear()
        self.copies.clear()
        self.waits.clear()
        self.replays = 0


LOG = Log()


def on_device(tensor: Tensor) -> bool:
    return getattr(tensor.untyped_storage(), "on_device", False)


def mark(tensor: Tensor) -> Tensor:
    storage: Any = tensor.untyped_storage()
    storage.on_device = True
    return tensor


def pin(tensor: Tensor) -> None:
    storage: Any = tensor.untyped_storage()
    storage.pinned = True


REGISTERED: list[range] = []  # addresses of host memory that a program has pinned itself


def is_pinned(tensor: Tensor) -> bool:
    if getattr(tensor.untyped_storage(), "pinned", False):
        return True
    return any(tensor.data_ptr() in addresses for addresses in REGISTERED)


_inside = 0  # depth of `inside`


@contextmanager
def inside() -> Iterator[None]:
    """Work of the device on its own memory, which is not logged."""
    global _inside
    _inside += 1
    try:
        with _disable_current_modes():
            yield
    finally:
        _inside -= 1


def caller() -> str:
    """The caller: the innermost frame that belongs neither to torch nor to the device."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "torch" not in path.parts and path.parent != Path(__file__).parent:
            return f"{path.parent.name}/{path.name}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "?"


def waited(what: str, until: int | None = None) -> None:
    """The host waits for the device until `until` copies are made. None: all copies."""
    if _inside:
        return
    if Recording.current is not None:
        raise DeviceError(f"{what} is not permitted while a graph is captured ({caller()})")
    LOG.waits.append(f"{caller()} {what}")
    with inside():
        COPIES.make(until)


def poison(tensor: Tensor) -> None:
    """Overwrite a tensor with values that no test can take for a result."""
    with inside():
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        elif tensor.dtype == torch.bool:
            tensor.logical_not_()
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).max)


# ---------------------------------------------------------------------------------------------
# copies between host and device


class Copies:
    """Non-blocking copies. The host can see and rely on them only after it has waited."""

    def __init__(self) -> None:
        self.made = 0
        self._queue: list[Callable[[], object]] = []

    @property
    def queued(self) -> int:
        """The number of all copies that were ever queued."""
        return self.made + len(self._queue)

    def add(self, make: Callable[[], object]) -> None:
        self._queue.append(make)

    def make(self, until: int | None = None) -> None:
        count = len(self._queue) if until is None else max(0, until - self.made)
        ready, self._queue = self._queue[:count], self._queue[count:]
        self.made += len(ready)
        for each in ready:
            each()


COPIES = Copies()


def copy_over(there: Tensor, here: Tensor, non_blocking: bool) -> None:
    """Copy between host and device. Both have the same shape, or broadcast."""
    to_device, host = on_device(there), here if on_device(there) else there
    LOG.copies.append("to device" if to_device else "to host")
    pinned = is_pinned(host)
    if Recording.current is not None and not pinned:
        raise DeviceError(f"a copy of pageable memory in a graph ({caller()})")
    if not non_blocking:
        waited("copy " + LOG.copies[-1])
    with inside():
        if not non_blocking:
            there.copy_(here)
            return
        value, asker = here.to(there.dtype, copy=True), caller()
        if not to_device:
            COPIES.add(lambda: there.copy_(value))
            poison(there)
            return
        there.copy_(value)
        if not pinned:  # copied at once into memory of the driver
            return

    def leave() -> None:
        """The device copies late, so the source must not have changed meanwhile."""
        same = (here.to(value.dtype) == value) | (value != value)
        if not bool(same.all()):
            raise DeviceError(f"pinned memory changed before its copy was made ({asker})")

    COPIES.add(leave)


def moved(tensor: Tensor, to_device: bool, dtype: torch.dtype, non_blocking: bool) -> Tensor:
    """Copy a tensor to the other side."""
    with inside():
        there = torch.empty_like(tensor, dtype=dtype)
    if to_device:
        mark(there)
    elif non_blocking:
        pin(there)  # as in torch
    copy_over(there, tensor, non_blocking)
    return there


# ---------------------------------------------------------------------------------------------
# operations


def tensors_in(values: Any) -> Iterator[Tensor]:
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


REFERENCES: dict[str, Callable[..., Any]] = {}  # of operations that a CPU does not have, by name


BODIES: dict[str, Callable[..., Any]] = {}  # of operations that are written in Python


class Recording:
    """The launches of a graph during its capture, and the memory that they allocated."""

    current: Recording | None = None

    def __init__(self) -> None:
        self.launches: list[Callable[[], None]] = []
        self.made: list[Tensor] = []

    def add(self, launch: Callable[[], Any], made: list[Tensor]) -> None:
        """A replay runs `launch` again, and copies its results to the memory of the first time."""

        def again() -> None:
            result = launch()
            results = result if isinstance(result, (list, tuple)) else [result]
            for there, here in zip(made, tensors_in(results), strict=True):
                there.copy_(here)

        self.launches.append(again if made else launch)
        self.made.extend(made)


def launched(name: str, launch: Callable[[], Any], made: list[Tensor] | None = None) -> None:
    """Record a kernel: in the graph that is being captured, else in the log."""
    if Recording.current is not None:
        Recording.current.add(launch, made or [])
    else:
        (LOG.copies if name == "copy" else LOG.launches).append(name)


def _is_memcpy(name: str, args: Any) -> bool:
    """Whether torch copies on the device without a kernel."""
    if name not in ("copy_", "clone"):
        return False
    there: Tensor = args[0]
    here: Tensor = args[1 if name == "copy_" else 0]
    same = there.dtype == here.dtype and there.shape == here.shape
    return same and there.is_contiguous() and here.is_contiguous()


class DeviceMode(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        given = list(tensors_in(args)) + (list(tensors_in(kwargs)) if kwargs else [])
        wanted = kwargs.get("device")
        here = [on_device(tensor) for tensor in given]
        if (body := BODIES.get(func._schema.name)) is not None:
            with self:
                return body(*args, **kwargs)
        if not any(here) and (wanted is None or wanted.type != "cuda"):
            pinned = kwargs.pop("pin_memory", None)
            result = func(*args, **kwargs)
            if pinned:
                pin(result)
            return result
        return self._on_device(func, args, kwargs, given, here, wanted)

    def _on_device(
        self, func: Any, args: Any, kwargs: Any, given: list[Tensor], here: list[bool], wanted: Any
    ) -> Any:
        namespace, name = func._schema.name.split("::")
        if name == "copy_" and not isinstance(args[1], Tensor):  # a number
            func, name = aten.fill_.Scalar, "fill_"
        if name == "copy_" and here[0] != here[1]:
            copy_over(args[0], args[1], (args[2:] or [kwargs.get("non_blocking", False)])[0])
            return args[0]
        if name == "_to_copy" and wanted is not None and here[0] != (wanted.type == "cuda"):
            dtype = kwargs.get("dtype") or args[0].dtype
            return moved(args[0], not here[0], dtype, kwargs.get("non_blocking", False))
        if wanted is not None:
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        self._check(name, args, kwargs, given, here)
        run = REFERENCES.get(f"{namespace}::{name}", func)
        with inside():
            result = run(*args, **kwargs)
        results = result if isinstance(result, (list, tuple)) else [result]
        storages = {tensor.untyped_storage()._cdata for tensor in given}
        fresh = [
            mark(t)
            for t in results
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in storages
        ]
        if name in NO_KERNEL:
            if Recording.current is not None:
                Recording.current.made.extend(fresh)
        elif fresh or run is not func or func._schema.is_mutable:
            name = "copy" if _is_memcpy(name, args) else f"{namespace}::{name}"
            launched(name, lambda: run(*args, **kwargs), fresh)
        return result

    def _check(self, name: str, args: Any, kwargs: Any, given: list[Tensor], here: Any) -> None:
        strangers = [t for t, there in zip(given, here, strict=True) if not there and t.dim() > 0]
        if "device" in kwargs or name in BETWEEN:  # only the shape of a tensor is used, or copies
            return
        if name in TAKE_INDICES:
            indices = [t for t in args[1] if t is not None]
            masks = [t for t in indices if t.dtype in (torch.bool, torch.uint8)]
            if strangers and not on_device(args[0]):
                raise DeviceError(f"{name} of a host tensor by a device tensor ({caller()})")
            if any(not on_device(t) and t.dim() for t in indices):
                waited("copy of an index")
            filled = name != "index" and args[2].numel() == 1
            if masks and not filled:
                waited("index by a mask")
            strangers = [t for t in strangers if all(t is not i for i in indices)]
        elif name in OF_VALUES or (name == "repeat_interleave" and "output_size" not in kwargs):
            waited(name)
        if strangers:
            shapes = [(tuple(t.shape), on_device(t)) for t in given]
            raise DeviceError(f"{name}: host and device tensors meet, {shapes} ({caller()})")
