"""Optimisation that can be continued: Muon and AdamW, a schedule, a checkpoint."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm


def _multiplies_bf16_faster() -> bool:
    """Whether this CPU multiplies bfloat16 faster than float32, by the best of 8 products.

    Without AVX-512 it is 30 times as slow.
    """
    best = []
    for dtype in (torch.bfloat16, torch.float32):
        matrix = torch.ones(256, 256, dtype=dtype)
        seconds = []
        for _ in range(8):
            started = time.perf_counter()
            matrix @ matrix
            seconds.append(time.perf_counter() - started)
        best.append(min(seconds))
    return best[0] < best[1]


MIXED_ON_CPU = _multiplies_bf16_faster()


def autocast(device: str) -> torch.autocast:
    """Products in bfloat16, except on a CPU that is slow at them."""
    mixed = device != "cpu" or MIXED_ON_CPU
    return torch.autocast(device, dtype=torch.bfloat16, enabled=mixed)


def _optimizers(model: torch.nn.Module, lr: float, muon: bool) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the rest. Without `muon`, AdamW for all."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for name, p in named if muon and p.dim() == 2 and "embed" not in name]
    rest = [p for name, p in named if not muon or p.dim() != 2 or "embed" in name]
    if not muon:
        return [torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _schedule(step: int, steps: int) -> float:
    """Linear warm-up over 4%, then cosine to 2%."""
    warm = max(1, int(0.04 * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


class Run:
    """A model and its optimizers, read from `path` if it exists. `step()` is one update."""

    def __init__(
        self, model: torch.nn.Module, lr: float, steps: int, path: Path, muon: bool = True
    ) -> None:
        self.model, self.steps, self.path, self.lr = model, steps, path, lr
        self.optimizers = _optimizers(model, lr, muon)
        self.done = 0
        self.seconds = 0.0
        if path.exists():
            state = torch.load(path, weights_only=False)
            model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.done, self.seconds = state["done"], state["seconds"]

    def step(self, loss: Tensor) -> None:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.lr * _schedule(self.done, self.steps)
            optimizer.step()
            optimizer.zero_grad()
        self.done += 1

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "done": self.done,
            "seconds": self.seconds,
        }
        torch.save(state, self.path.with_suffix(".tmp"))
        self.path.with_suffix(".tmp").replace(self.path)

    def steps_left(self, what: str, every: int = 50) -> Iterator[tqdm]:
        """Yield a progress bar for each remaining step. Save every `every` steps and at the end."""
        bar = tqdm(total=self.steps, initial=self.done, desc=what, file=sys.stdout, mininterval=10)
        with bar:
            while self.done < self.steps:
                started = time.monotonic()
                yield bar
                self.seconds += time.monotonic() - started
                bar.update()
                if self.done % every == 0 or self.done == self.steps:
                    self.save()
