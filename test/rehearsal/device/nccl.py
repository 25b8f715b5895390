"""NCCL of the simulated GPU: gloo, whose collectives of device tensors are launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from test.rehearsal.device import memory

distributed: Any = torch.distributed
REDUCE, GATHER = distributed.all_reduce, distributed.all_gather_into_tensor


def gather_flat(output: Tensor, given: Tensor, group: Any = None) -> None:
    GATHER(output.view(-1), given.reshape(-1), group=group)


def reduce_scatter(output: Tensor, given: Tensor, group: Any = None) -> None:
    summed = given.clone()
    REDUCE(summed, group=group)
    ranks, rank = distributed.get_world_size(group), distributed.get_rank(group)
    output.copy_(summed.tensor_split(ranks)[rank])


def collective(name: str, original: Any, reference: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which launches its reference if it is given device tensors."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not any(map(memory.on_device, memory.tensors_in([*args, *kwargs.values()]))):
            return original(*args, **kwargs)

        def run() -> None:
            with memory.inside():
                reference(*args, **kwargs)

        run()
        memory.launched(f"nccl::{name}", run)
        return None

    return call


class Communicator:
    """In place of `PyNcclCommunicator`, which SGLang uses while it captures a graph."""

    def __init__(self, group: Any, device: Any, **_: Any) -> None:
        self.group, self.world_size = group, distributed.get_world_size(group)
        self.disabled = True

    @contextmanager
    def change_state(self, enable: bool) -> Iterator[None]:
        before, self.disabled = self.disabled, not enable
        try:
            yield
        finally:
            self.disabled = before

    def all_reduce(self, tensor: Tensor) -> None:
        distributed.all_reduce(tensor, group=self.group)

    def all_gather(self, output: Tensor, given: Tensor) -> None:
        distributed.all_gather_into_tensor(output, given, group=self.group)

    def reduce_scatter(self, output: Tensor, given: Tensor) -> None:
        distributed.reduce_scatter_tensor(output, given, group=self.group)


def pretend() -> None:
    for name in ("init_process_group", "new_group"):
        original = getattr(distributed, name)

        def with_gloo(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            kwargs.pop("device_id", None)
            kwargs.pop("pg_options", None)
            if kwargs.get("backend") is not None:
                kwargs["backend"] = "gloo"
            elif args and args[0] == "nccl":
                args = ("gloo", *args[1:])
            return original(*args, **kwargs)

        setattr(distributed, name, with_gloo)
    for name, reference in {
        "all_reduce": REDUCE,
        "broadcast": distributed.broadcast,
        "all_gather_into_tensor": gather_flat,
        "reduce_scatter_tensor": reduce_scatter,
    }.items():
        setattr(distributed, name, collective(name, getattr(distributed, name), reference))
    from sglang.srt.distributed.device_communicators import pynccl

    pynccl.PyNcclCommunicator = Communicator
