"""Triton kernels: compiled for sm_90 with the launched arguments, and run by the interpreter."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver, interpreter
from triton.runtime.jit import JITFunction

from test.rehearsal.device import memory

HOPPER = GPUTarget("cuda", 90, 32)
# If a dict, kernels are compiled: name to kinds of pointers, each with the hash of what is made.
COMPILED: dict[str, set[str]] | None = None


class Driver(DriverBase):
    """The properties of a GPU that Triton's compiler reads."""

    def __init__(self) -> None: ...
    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        return memory.CUDA

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Any:
        """Triton's autotuner takes the first of its configurations."""
        return lambda *_, quantiles, **__: [0.0 for _ in quantiles]


# A kernel may start before the one before it ends, and waits for it. Here it starts behind it.
EARLY = ("gdc_wait", "gdc_launch_dependents")


class Language:
    """The changes that the interpreter makes to Triton's language while a kernel runs.

    This replaces `interpreter._patch_lang`. That collects the changes at each launch, for the names
    that the kernel uses. Here they are collected once, and its helpers see them, too.
    """

    def __init__(self) -> None:
        self._find = interpreter._patch_lang
        self._found: list[tuple[Any, str, Any]] = []

    def __call__(self, _: Any) -> Any:
        if not self._found:
            scope = self._find(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
            self._found = [(place, name, getattr(place, name)) for place, name, _ in scope._changes]
            self._found += [(tl.extra.cuda, name, lambda: None) for name in EARLY]
            scope.restore()
        scope = interpreter._LangPatchScope()
        for change in self._found:
            scope.set_attr(*change)
        return scope


_find_numpy_dtype = interpreter._get_np_dtype
_numpy_dtypes: dict[str, Any] = {}


def _numpy_dtype(kind: Any) -> Any:
    """`interpreter._get_np_dtype`, which lists all dtypes anew in every call."""
    if kind.name not in _numpy_dtypes:
        _numpy_dtypes[kind.name] = _find_numpy_dtype(kind)
    return _numpy_dtypes[kind.name]


class LateType:
    """The type of a tuple of Triton's language, made when somebody asks: hardly anybody does."""

    def __get__(self, values: Any, _: Any) -> Any:
        values.type = tl.core._type_for_tuple_values(values.values)
        return values.type


def _tuple(self: Any, values: Any, type: Any = None) -> None:
    """`tl.tuple.__init__`, with a `LateType`."""
    self.values = list(values)
    if type is not None:
        self.type = type if isinstance(type, tl.core.tuple_type) else tl.core.tuple_type(type)


class InPlace(interpreter.GridExecutor):
    """Runs on the device's own memory, which a CPU can read."""

    def _init_args_hst(self, args: Any, kwargs: Any) -> Any:
        return args, kwargs

    def _restore_args_dev(self, *_: Any) -> None: ...


def _interpreted(kernel: JITFunction) -> interpreter.InterpretedFunction:
    if not hasattr(kernel, "interpreted"):
        kernel.interpreted = interpreter.InterpretedFunction(kernel.fn)
    return kernel.interpreted


def _call(kernel: JITFunction, *args: Any, **kwargs: Any) -> Any:
    """Call a kernel's helper. The interpreter's own call leaves Triton's language patched."""
    return _interpreted(kernel).rewrite()(*args, **kwargs)


def _run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    name = f"{kernel.fn.__module__.removeprefix('sglang.')}:{kernel.fn.__name__}"
    for given, value in (*zip(kernel.arg_names, args, strict=False), *kwargs.items()):
        if isinstance(value, Tensor) and not memory.on_device(value):
            where = memory.caller()
            raise memory.DeviceError(f"{name} is given the host tensor {given} ({where})")
    if COMPILED is not None:
        _compile(kernel, name, args, kwargs)
    options = {k: v for k, v in kwargs.items() if k in kernel.arg_names}

    def launch() -> None:
        with memory.inside():
            executor = InPlace(_interpreted(kernel).rewrite(), kernel.arg_names, grid)
            executor(*args, **options)

    launch()
    memory.launched(name, launch)


def _compile(kernel: JITFunction, name: str, args: Any, kwargs: Any) -> None:
    """Compile as a launch with these arguments would. Raises the errors of Triton's compiler."""
    assert COMPILED is not None
    made = _jit_run(kernel, *args, grid=None, warmup=True, **kwargs)
    assert made.asm["cubin"]
    kinds = (f"{name}: {kind}" for name, kind in made.src.signature.items() if kind[0] == "*")
    COMPILED.setdefault(name, set()).add(f"{', '.join(kinds)} ({made.hash})")


_jit_run = JITFunction.run


@triton.jit
def exp(x):  # type: ignore[no-untyped-def]
    """`tl.exp`, looked up when it is called. An alias of it is not the interpreter's."""
    return tl.exp(x)


def pretend() -> None:
    driver.set_active(Driver())
    kind: Any = JITFunction
    kind.run = _run
    kind.__call__ = _call
    interpreter.InterpretedFunction.pre_run_hooks = []
    interpreter._patch_lang = Language()
    interpreter._get_np_dtype = _numpy_dtype
    # Unless it debugs, the interpreter computes every check for overflow and drops the result.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    tl.core.tuple.__init__, tl.core.tuple.type = _tuple, LateType()
    triton.knobs.runtime.interpret = False
