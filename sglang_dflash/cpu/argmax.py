"""The largest logit of a row on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import wrap_torch_function


@wrap_torch_function(lambda logits: (logits,))  # one call to `cpu.graphs`
def argmax_on_cpu(logits: Tensor) -> Tensor:
    """What `kernels.argmax.argmax` says.

    PyTorch's own CPU kernel looks at one element at a time; NumPy's is vectorised.
    """
    if logits.dtype == torch.float32:
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def largest_in_torch(logits: Tensor, weigh: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """What `kernels.argmax.launch_largest` does, which has the shapes."""
    index = argmax_on_cpu(logits)
    value = logits.gather(1, index[:, None]).squeeze(1).float()
    mass = (logits.float() - value[:, None]).exp_().sum(dim=-1) if weigh else None
    return index, value, mass
