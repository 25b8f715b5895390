"""`torch.cuda` of the simulated GPU: one H100, which does all work at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from test.rehearsal.device import memory
from test.rehearsal.device.memory import CPU, CUDA, LOG, DeviceError, on_device

MEMORY = 80 * 2**30
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=MEMORY,
    multi_processor_count=132,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 * 2**20,
    gcnArchName="",
    is_integrated=False,
    uuid="0",
)


def synchronize(*_: object) -> None:
    memory.waited("synchronize")


class Stream:
    cuda_stream = stream_id = device_index = 0
    device = CUDA
    priority = 0

    def __init__(self, *_: object, **__: object) -> None: ...
    def wait_stream(self, _: object) -> None: ...
    def wait_event(self, _: object) -> None: ...
    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        synchronize()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


class Event:
    def __init__(self, *_: object, **__: object) -> None:
        self._copies = 0  # queued before it

    def record(self, _: object = None) -> None:
        self._copies = memory.COPIES.queued

    def wait(self, _: object = None) -> None: ...
    def query(self) -> bool:
        return self._copies <= memory.COPIES.made

    def synchronize(self) -> None:
        memory.waited("event", self._copies)

    def elapsed_time(self, _: Event) -> float:
        return 1.0


class CUDAGraph:
    """Captured launches. A replay runs them again, and they write to the same memory.

    Graphs of one pool share memory: a replay destroys the results of another graph of the pool.
    """

    last: CUDAGraph | None = None  # the last one replayed; its memory is not poisoned yet

    def __init__(self, *_: object, **__: object) -> None:
        self._recording = memory.Recording()

    def capture_begin(self, pool: object = None, **_: object) -> None:
        if memory.Recording.current is not None:
            raise DeviceError("a capture inside of a capture")
        memory.Recording.current = self._recording

    def capture_end(self) -> None:
        memory.Recording.current = None
        self._poison()

    def replay(self) -> None:
        if CUDAGraph.last not in (None, self):
            CUDAGraph.last._poison()
        CUDAGraph.last = self
        LOG.replays += 1
        with memory.inside():
            for launch in self._recording.launches:
                launch()

    def _poison(self) -> None:
        for tensor in self._recording.made:
            memory.poison(tensor)

    def reset(self) -> None: ...
    def pool(self) -> tuple[int, int]:
        return (0, 1)


@contextlib.contextmanager
def graph(cuda_graph: CUDAGraph, pool: object = None, stream: object = None, **_: object) -> Any:
    cuda_graph.capture_begin(pool)
    try:
        yield
    finally:
        cuda_graph.capture_end()


def _register(address: int, size: int, _: int) -> int:
    """`cudaHostRegister`: pin host memory."""
    memory.REGISTERED.append(range(address, address + size))
    return 0


class _Place(contextlib.nullcontext[None]):
    def __init__(self, *_: object) -> None:
        super().__init__()


STREAM = Stream()


def pretend() -> None:
    """Let torch see one H100."""
    cuda: Any = torch.cuda
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "init": lambda: None,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: PROPERTIES,
        "get_device_name": lambda *_: PROPERTIES.name,
        "mem_get_info": lambda *_: (MEMORY - 2**29, MEMORY),
        "memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "manual_seed": lambda _: None,
        "manual_seed_all": lambda _: None,
        "synchronize": synchronize,
        "Stream": Stream,
        "Event": Event,
        "ExternalStream": Stream,
        "current_stream": lambda *_: STREAM,
        "default_stream": lambda *_: STREAM,
        "stream": lambda _: contextlib.nullcontext(),
        "set_stream": lambda _: None,
        "device": _Place,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "graph_pool_handle": lambda: (0, 1),
        "is_current_stream_capturing": lambda: memory.Recording.current is not None,
        "can_device_access_peer": lambda *_: True,
        "cudart": lambda: SimpleNamespace(cudaHostRegister=_register),
    }.items():
        setattr(cuda, name, value)
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    module_of, of_torch = torch.get_device_module, cast(Any, torch)
    of_torch.get_device_module = lambda device=None: module_of(device or "cuda")
    _pretend_tensors()
    mode: Any = memory.DeviceMode
    mode().__enter__()


def _pretend_tensors() -> None:
    """Patch the device of tensors, and reads by the host that are no operation of torch."""
    kind: Any = Tensor
    to: Callable[..., Tensor] = kind.to
    tolist, numpy, tensor = kind.tolist, kind.numpy, torch.tensor
    as_tensor, device = torch.as_tensor, kind.device

    def place(self: Tensor) -> torch.device:
        there = device.__get__(self)
        return CUDA if there.type == "cpu" and on_device(self) else there

    kind.device = property(place)
    kind.is_cuda = property(lambda self: self.device.type == "cuda")
    kind.is_cpu = property(lambda self: self.device.type == "cpu")
    kind.get_device = lambda self: 0 if self.is_cuda else -1

    def moved_to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copy = kwargs.pop("copy", False)
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        where, dtype, non_blocking, form = torch._C._nn._parse_to(*args, **kwargs)
        there = self.device
        if there.type not in ("cpu", "cuda") or (where and where.type not in ("cpu", "cuda")):
            return to(self, *args, **kwargs)
        if where is not None and where.type != there.type:
            return memory.moved(self, where.type == "cuda", dtype or self.dtype, non_blocking)
        options = {} if form is None else {"memory_format": form}
        return to(self, dtype=dtype or self.dtype, copy=copy, **options)

    kind.to = moved_to
    kind.cpu = lambda self, *_, **__: self.to(CPU)
    kind.cuda = lambda self, *_, non_blocking=False, **__: self.to(CUDA, non_blocking=non_blocking)

    def listed(self: Tensor) -> Any:
        if on_device(self):
            memory.waited("tolist")
        return tolist(self)

    kind.tolist = listed

    def as_numpy(self: Tensor, **kwargs: Any) -> Any:
        if on_device(self):
            raise TypeError("can't convert cuda:0 device type tensor to numpy.")
        return numpy(self, **kwargs)

    kind.numpy = as_numpy
    array = kind.__array__
    kind.__array__ = lambda self, *a, **k: array(self, *a, **k) if as_numpy(self) is not None else 0

    def pinned(self: Tensor, *_: object) -> Tensor:
        copy = self.clone()
        memory.pin(copy)
        return copy

    kind.pin_memory = pinned
    kind.is_pinned = lambda self, *_: memory.is_pinned(self)
    kind.record_stream = lambda self, _: None

    def made(original: Any) -> Any:
        def make(data: Any, *args: Any, **kwargs: Any) -> Tensor:
            where, pin = kwargs.pop("device", None), kwargs.pop("pin_memory", False)
            if where is None and not isinstance(data, Tensor):
                where = _default_device()
            with torch.device("cpu"):
                result: Tensor = original(data, *args, **kwargs)
            if pin:
                memory.pin(result)
            return result if where is None else result.to(where)

        return make

    torch.tensor, torch.as_tensor = made(tensor), made(as_tensor)

    def new(self: Tensor, data: Any, dtype: torch.dtype | None = None) -> Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=self.device)

    kind.new_tensor = new

    # It allocates memory in C++, where a marked tensor counts as a host tensor.
    functional: Any = torch._C._nn
    pad_sequence = functional.pad_sequence

    def padded(sequences: Any, *args: Any) -> Tensor:
        result = pad_sequence(sequences, *args)
        return memory.mark(result) if any(map(on_device, sequences)) else result

    functional.pad_sequence = padded
    storage: Any = torch.UntypedStorage
    storage.is_pinned = lambda self, *_: getattr(self, "pinned", False)


def _default_device() -> torch.device | None:
    """The device of a `with torch.device(..)`."""
    modes = _get_current_function_mode_stack()
    return next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)
