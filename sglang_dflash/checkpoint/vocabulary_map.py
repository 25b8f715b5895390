"""The map from ids of a smaller draft vocabulary to those of the target."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.checkpoint.files import FETCH_AGAIN
from sglang_dflash.errors import Refusal


def check_map(config: DFlashConfig, offsets: Tensor, target_mask: Tensor | None) -> None:
    """Raise `Refusal` unless d2t maps draft ids to distinct ids of the target.

    offsets: d2t [draft vocabulary], target id minus draft id. target_mask: t2d [target vocabulary],
    True for every id that d2t must reach. None if the checkpoint has no t2d.
    """
    ids = torch.arange(len(offsets), device=offsets.device) + offsets
    in_vocabulary = int(ids.min()) >= 0 and int(ids.max()) < config.vocab_size
    distinct = len(set(ids.tolist())) == len(ids)
    as_marked = True
    if target_mask is not None:
        marked = target_mask.to(ids.device).nonzero().flatten()
        as_marked = torch.equal(ids.sort().values, marked)
    if not (in_vocabulary and distinct and as_marked):
        mask = "" if target_mask is None else " or its t2d"
        raise Refusal(
            f"The draft {config.path} has a vocabulary map d2t that does not fit its target of "
            f"{config.vocab_size} tokens{mask}.",
            FETCH_AGAIN,
        )
