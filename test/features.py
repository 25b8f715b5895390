"""Features that a server has written, compared with Transformers' hidden states."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from sglang_dflash.settings.options import FORMS
from sglang_dflash.trainer.features import ASK
from sglang_dflash.trainer.features import FORMS as WRITERS

WANTED: dict[str, Any] = {"custom_params": {ASK: True}}
BOUND = 5e-4  # of fp32, absolute and relative


def read(folder: Path, rid: str, form: str = FORMS[0]) -> dict[str, Tensor]:
    """The features of a request, with the names of SpecForge, which has a key for each part."""
    file = folder / f"{rid}{WRITERS[form][1]}"
    for _ in range(100):  # another thread writes it
        if file.exists():
            break
        time.sleep(0.05)
    if form == "specforge":
        found: dict[str, Tensor] = torch.load(file, weights_only=True)
        return found
    stored = load_file(file)
    states = stored["hidden_states"]
    return {
        "input_ids": stored["token_ids"],
        "loss_mask": stored["loss_mask"].long(),
        "hidden_states": states[:, :-1].flatten(1),
        "target_last_hidden_states": states[:, -1],
    }


def check(
    model: Any,
    found: dict[str, Tensor],
    ids: list[int],
    output: list[int],
    form: str = FORMS[0],
    layers: Sequence[int] = (1, 3),
) -> None:
    """All tokens of prompt and answer are there, but perhaps the last, with the target's states.

    model: Transformers' of the target, in fp32; layers: of the features, as Transformers counts.
    """
    count = len(found["input_ids"])
    assert len(ids) + len(output) - 1 <= count <= len(ids) + len(output)
    assert found["input_ids"].tolist() == (ids + output)[:count]
    assert found["loss_mask"].tolist() == ([0] * len(ids) + [1] * len(output))[:count]
    with torch.no_grad():
        of_layers = model(torch.tensor([ids + output]), output_hidden_states=True).hidden_states
    expected = torch.cat([of_layers[layer][0, :count] for layer in layers], dim=1)
    torch.testing.assert_close(found["hidden_states"], expected, atol=BOUND, rtol=BOUND)
    last = found["target_last_hidden_states"]
    if form == "speculators":  # which norms it
        last = model.model.norm(last)
    torch.testing.assert_close(last, of_layers[-1][0, :count], atol=BOUND, rtol=BOUND)
