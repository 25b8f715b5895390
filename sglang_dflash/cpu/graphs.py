"""CPU graphs: forwards of few tokens are captured once and replayed, like CUDA graphs on a GPU.

A small forward spends a fifth of its time between its operations, in the Python of its modules. The
first forward of a number of tokens runs in the modules, and its calls of torch are listed. Later
forwards run the list, written as one Python function. It makes the same calls on the same weights
in the same order, so the bits are the same. A function that follows the torch function protocol is
one call of the list: attention, which plans for each batch, and the argmax. If torch does not see
all that a forward does, the first replay gives another output, and the forward is not captured.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import fields
from enum import Enum
from functools import cache
from types import CodeType
from typing import Any, TypeAlias
from weakref import WeakSet

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sglang_dflash.cpu.lean import cos_and_sin, make_lean

logger = logging.getLogger(__name__)

MOST_TOKENS = 64  # of a captured forward; with more tokens, the Python matters less
GIVEN = ("input_ids", "positions", "mrope_positions")  # tensors of a batch that a forward reads
# Calls that return no tensor and depend on shapes only. Other such calls read values.
SHAPE_CALLS = {"__get__", "__len__", "dim", "get_device", "numel", "size", "stride"}
SHAPE_CALLS |= {"is_contiguous", "is_floating_point", "_set_grad_enabled"}
# Calls whose result has a shape that depends on values.
CALLS_SHAPED_BY_VALUES = {
    "argwhere",
    "bincount",
    "masked_select",
    "nonzero",
    "unique",
    "unique_consecutive",
}
SAME = ("contiguous", "float", "to")  # return their argument itself if there is nothing to do
# Arguments that are the same in every forward of a kind; weights and layers keep their identity.
PLAIN = (int, float, str, torch.dtype, torch.device, torch.memory_format, torch.layout)
SETTLED = (*PLAIN, type(None), type(...), nn.Module, Tensor)

# Weights that are no parameters: the halves of `kv_b_proj` of latent attention.
UNREGISTERED = ("w_kc", "w_vc")

Graph: TypeAlias = Callable[..., dict[str, Tensor | None]]


class NotCapturable(Exception):
    """A replay could differ from the forward. The message says why."""


# Errors of a model that looks at an `Unknown`, or that cannot run in `Capture`.
CAPTURE_ERRORS = (NotCapturable, AttributeError, RuntimeError, TypeError, ValueError)


class Unknown:
    """Replaces host values of a batch. A forward that reads one of them cannot be captured."""

    def _refuse(self, *_: object) -> Any:
        raise NotCapturable("it depends on more of the batch than the number of its tokens")

    __bool__ = __eq__ = __getattr__ = _refuse
    __class__ = property(_refuse)


class Capture(TorchFunctionMode):
    """Lists the calls of torch in a forward."""

    def __init__(self, given: dict[str, object], weights: list[Tensor]) -> None:
        """given: arguments of every replay, by name; weights: tensors that are the same in all."""
        super().__init__()
        self._given, self._weights = tuple(given), {id(weight) for weight in weights}
        self._names = {id(value): name for name, value in given.items()}
        self._kept: list[object] = list(given.values())  # kept alive, so that no id is reused
        self._constants: list[object] = []
        self._calls: list[tuple[str, set[str], list[str]]] = []  # source, what it reads and makes
        self._shared: dict[tuple[int, ...], Any] = {}  # what layers share, by its arguments' ids

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in CALLS_SHAPED_BY_VALUES or _selects_by_value(name, args):
            raise NotCapturable(f"the shape of `{name}` depends on values")
        shared = tuple(map(id, args)) if func is cos_and_sin else ()
        if shared in self._shared:
            return self._shared[shared]
        result = func(*args, **(kwargs or {}))
        if shared:
            self._shared[shared] = result
        if name in SAME and result is args[0]:
            return result
        several = isinstance(result, (list, tuple))
        tensors = list(result) if several else [result]
        if name == "__setitem__":
            tensors = []
        elif not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
            if name not in SHAPE_CALLS:
                raise NotCapturable(f"`{name}` returns {type(result).__name__}, not a tensor")
            for value in args:  # the shape of an unknown tensor may depend on the requests
                if isinstance(value, Tensor):
                    self._source(value, set())
            return result
        reads: set[str] = set()
        given = [self._source(value, reads) for value in args]
        given += [f"{key}={self._source(value, reads)}" for key, value in (kwargs or {}).items()]
        source = f"{self._constant(func)}({', '.join(given)})"
        made = [self._name(tensor) for tensor in tensors]
        if made:
            source = f"{', '.join(made)}{',' * several} = {source}"
        self._calls.append((source, reads, made))
        return result

    def _name(self, result: Tensor) -> str:
        self._names[id(result)] = name = f"v{len(self._kept)}"
        self._kept.append(result)
        return name

    def _source(self, value: Any, reads: set[str]) -> str:
        """The source of an argument in the function. The names in it are added to `reads`."""
        name = self._names.get(id(value))
        if name is not None:
            reads.add(name)
            return name
        if isinstance(value, Tensor) and id(value) not in self._weights:
            raise NotCapturable("it reads a tensor of neither the batch nor the model")
        if isinstance(value, (list, tuple)):
            inner = "".join(f"{self._source(each, reads)}, " for each in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner})"
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return f"slice({', '.join(self._source(part, reads) for part in parts)})"
        if not isinstance(value, SETTLED):
            raise NotCapturable(f"its {type(value).__name__} may differ in the next batch")
        return self._constant(value)

    def _constant(self, value: object) -> str:
        self._constants.append(value)
        return f"c{len(self._constants) - 1}"

    def graph(self, output: LogitsProcessorOutput) -> tuple[str, Graph]:
        """Source and function: it maps the given values, by name, to the fields of the output."""
        used: set[str] = set()
        if vars(output).keys() != {field.name for field in fields(output)}:
            raise NotCapturable("its output has more than SGLang's fields")
        ends = [f"{key!r}: {self._source(value, used)}" for key, value in vars(output).items()]
        lines = [f"return {{{', '.join(ends)}}}"]
        for source, reads, made in reversed(self._calls):
            dead = ({*reads, *made} - used).difference(self._given)  # later calls need none
            if dead:
                lines.append(f"del {', '.join(sorted(dead))}")
            lines.append(source)
            used |= reads
        body = "\n ".join(reversed(lines))
        scope: dict[str, Any] = {f"c{i}": value for i, value in enumerate(self._constants)}
        source = f"def graph({', '.join(self._given)}):\n {body}"
        exec(_compiled(source), scope)
        return source, scope["graph"]


@cache  # forwards of different numbers of tokens differ only in constants
def _compiled(source: str) -> CodeType:
    return compile(source, "<CPU graph>", "exec")


class CpuGraphs:
    """Replaces SGLang's piecewise CUDA graph runner, for forwards of blocks."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._repeated: set[str] = set()  # sources whose replay has given the same output
        _RUNNERS.add(runner)
        self.forget()

    def forget(self) -> None:
        """Drop all captures, because weights may be other tensors now.

        A forward may run modules of the other models of this process: a draft shares its target's
        embedding.
        """
        models = [runner.model for runner in _RUNNERS]
        modules = [module for model in models for module in model.modules()]
        hooked = any(module._forward_hooks or module._forward_pre_hooks for module in modules)
        planned = hasattr(self._runner.model, "prepare_forward_batch")
        self._works = not (hooked or planned or self._runner.msprobe_debugger)
        self._graphs: dict[Any, Graph] = {}
        self._weights = [t for model in models for t in (*model.parameters(), *model.buffers())]
        others = [getattr(module, name, None) for module in modules for name in UNREGISTERED]
        self._weights += [value for value in others if isinstance(value, Tensor)]

    def can_run(self, batch: ForwardBatch) -> bool:
        if not self._works or not batch.forward_mode.is_target_verify():
            return False
        return len(batch.input_ids) <= MOST_TOKENS

    def replay(self, batch: ForwardBatch, **others: object) -> LogitsProcessorOutput:
        """Run a forward of the batch. The first one of a kind is captured. others: None each."""
        if batch.needs_forward_metadata_init():
            self._runner.attn_backend.init_forward_metadata(batch)
        flags = [value if _is_flag(value) else ... for value in vars(batch).values()]
        kind = (len(batch.input_ids), *flags)
        graph = self._graphs.get(kind)
        if graph is not None:
            return LogitsProcessorOutput(**graph(**self._given(batch)))
        try:
            self._graphs[kind], output = self._capture(batch, others)
        except CAPTURE_ERRORS as error:  # the model's own error is raised again below
            self._works = False
            model = type(self._runner.model).__name__
            logger.info(
                f"No CPU graphs for {model}: {error}. "
                "Its forwards are not captured, which is slower."
            )
            output = self._forward(batch, others)
        return output

    def _capture(self, batch: ForwardBatch, others: Any) -> tuple[Graph, LogitsProcessorOutput]:
        shown = copy.copy(batch)
        for name, value in vars(batch).items():
            if not _is_flag(value) and not isinstance(value, Tensor):
                setattr(shown, name, Unknown())
        tensors = {name: t for name, t in self._given(batch).items() if isinstance(t, Tensor)}
        for name, tensor in tensors.items():
            setattr(shown, name, tensor.clone())
        with Capture(self._given(shown), self._weights) as capture:
            output = self._forward(shown, others)
        if not all(_equal(tensor, getattr(shown, name)) for name, tensor in tensors.items()):
            raise NotCapturable("it changes the tensors of its batch")
        source, graph = capture.graph(output)
        if source not in self._repeated:
            for name, again in graph(**self._given(batch)).items():
                if again is not None and not _equal(again, getattr(output, name)):
                    raise NotCapturable(f"its replay gave other {name}")
            self._repeated.add(source)
        return graph, output

    def _given(self, batch: ForwardBatch) -> dict[str, object]:
        given = {"batch": batch, "backend": self._runner.attn_backend}
        tensors = {name: getattr(batch, name) for name in GIVEN}
        return given | {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def _forward(self, batch: ForwardBatch, others: dict[str, Any]) -> LogitsProcessorOutput:
        output = self._runner.model.forward(batch.input_ids, batch.positions, batch, **others)
        assert isinstance(output, LogitsProcessorOutput)
        return output


def _is_flag(value: object) -> bool:
    return value is None or isinstance(value, (bool, Enum))


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether both are equal bit for bit, except for the sign of 0 and the kind of NaN."""
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _selects_by_value(name: str, args: Any) -> bool:
    """Whether the result's shape depends on values: a mask as index, or a form of these calls."""
    if name == "repeat_interleave":
        return any(isinstance(value, Tensor) for value in args[1:]) or len(args) == 1
    index = args[1] if name == "__getitem__" else ()
    masks = index if isinstance(index, tuple) else (index,)
    by_mask = any(isinstance(m, Tensor) and m.dtype in (torch.bool, torch.uint8) for m in masks)
    return by_mask or (name == "where" and len(args) == 1)


_RUNNERS: WeakSet[ModelRunner] = WeakSet()  # of this process


def init_cpu_graphs(_: None, runner: ModelRunner, force_for_draft_worker: bool = False) -> None:
    """AFTER `ModelRunner.init_piecewise_cuda_graphs`: small forwards are captured from now on.

    With several ranks nothing is captured, because the calls that exchange their results are not
    functions of torch.
    """
    if runner.is_draft_worker and not force_for_draft_worker:
        return
    make_lean(runner.model)
    if runner.tp_size == 1:
        runner.piecewise_cuda_graph_runner = CpuGraphs(runner)


def forget(*_: object, **__: object) -> None:
    """AFTER `ModelRunner.update_weights_from_..`: captured forwards read the old weights."""
    for runner in _RUNNERS:
        if isinstance(runner.piecewise_cuda_graph_runner, CpuGraphs):
            runner.piecewise_cuda_graph_runner.forget()
