"""LoRA adapters on the target, and their hooks. The draft does not know them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sglang_dflash.errors import Rule, refuse
from sglang_dflash.seam.patched import temporarily
from sglang_dflash.settings.facts import Facts

CHUNK = 16  # tokens of a segment in csgmv, at least


def check_adapters(original: Callable[..., None], server_args: Any) -> None:
    """AROUND `ServerArgs.check_lora_server_args`, which refuses adapters with DFLASH."""
    with temporarily(server_args, speculative_algorithm=None):
        return original(server_args)


def set_verify_lengths(original: Callable[..., None], manager: Any, batch: Any) -> None:
    """AROUND `LoRAManager.prepare_lora_batch`: the lengths of a verify, where backends read them.

    They take a verify for a prefill, and a prefill's lengths are None in its batch.
    """
    if batch.forward_mode.is_target_verify():
        requests, width = batch.batch_size, batch.spec_info.draft_token_num
        batch = copy.copy(batch)
        batch.extend_num_tokens = requests * width
        batch.extend_seq_lens_cpu = [width] * requests
        lens = torch.full((requests,), width, dtype=torch.int32, device=batch.input_ids.device)
        batch.extend_seq_lens = lens
    original(manager, batch)


def run_all_segments(_: None, backend: Any, *, forward_batch: Any, **__: Any) -> None:
    """AFTER `ChunkedSgmvLoRABackend.prepare_lora_batch`: graphs run all segments that may occur.

    A segment is up to CHUNK tokens or more of one adapter. SGLang captures graphs without adapters,
    and the number of segments is captured with them. So further segments would not be computed.
    Unused ones are empty here.
    """
    info = backend.batch_info
    if not info.use_cuda_graph:
        return
    info.seg_indptr[info.num_segments + 1 :].fill_(len(forward_batch.input_ids))
    info.weight_indices[info.num_segments :].zero_()
    of_each = math.ceil(forward_batch.spec_info.draft_token_num / CHUNK)
    info.bs = info.num_segments = forward_batch.batch_size * of_each


@dataclass(frozen=True)
class AdaptedFacts(Facts):
    """A server of a loaded target with adapters."""

    parts: frozenset[type]  # classes of its modules, which show on which parts the adapters are


def _on_lm_head(facts: AdaptedFacts) -> bool:
    from sglang.srt.lora.layers import ParallelLMHeadWithLoRA

    return ParallelLMHeadWithLoRA in facts.parts and not facts.platform.adapted_heads


def _on_experts(facts: AdaptedFacts) -> bool:
    from sglang.srt.lora.layers import FusedMoEWithLoRA

    return FusedMoEWithLoRA in facts.parts


RULES: tuple[Rule[AdaptedFacts], ...] = (
    Rule(
        "LoRA adapters on experts",
        _on_experts,
        "LoRA adapters on experts are not served with DFLASH: SGLang's buffers for them have one "
        "token per request.",
        "Give --lora-target-modules without gate_up_proj and down_proj.",
    ),
    Rule(
        "LoRA adapters on `lm_head` on a CPU",
        _on_lm_head,
        "LoRA adapters on lm_head are not served with DFLASH {f.platform.place}: SGLang's "
        "torch_native backend gives requests of one prefill each other's adapters.",
        "Give --lora-target-modules without lm_head.",
    ),
)


def check_loaded_adapters(server_args: Any, target: nn.Module) -> None:
    """Raise `Refusal` for adapters on parts where SGLang cannot run them in a block.

    target: the loaded model.
    """
    refuse(RULES, AdaptedFacts(server_args, frozenset(map(type, target.modules()))))
