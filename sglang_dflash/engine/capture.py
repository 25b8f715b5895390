"""The target's states that the draft reads, with the last layer's among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.model.target_parts import logits_processor


def capture(model: Any, target_layer_ids: Sequence[int], layers: int, final_too: bool) -> None:
    """Let a target return the states that the draft reads.

    target_layer_ids: ascending; layers: of the target; final_too: also return the last one's, as
    the last of the features.

    SGLang captures before layer k + 1, which does not exist for the last layer. The LM head reads
    the output of the last layer, so the logits processor appends it (see `append_final_state`). It
    is also Transformers' `hidden_states[L]`, the state after the final norm. Drafts are trained on
    this state.
    """
    last = layers - 1
    if final_too or target_layer_ids[-1] == last:
        logits_processor(model).dflash_append_final = True
    captured = [i for i in target_layer_ids if i < last]
    if captured:
        try:
            model.set_dflash_layers_to_capture(captured)
        except AttributeError:  # no such hook, or Qwen3-VL's, which its text model does not support
            # EAGLE3's hook counts layers the same way in every class of SGLang that gets here.
            model.set_eagle3_layers_to_capture(captured)


def append_final_state(
    original: Any,
    processor: Any,
    input_ids: Any,
    hidden_states: Any,
    lm_head: Any,
    logits_metadata: Any,
    aux_hidden_states: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """AROUND `LogitsProcessor.forward`: add the last layer's state after the captured ones.

    aux_hidden_states: a list of them, or one tensor [n, K * H].
    """
    if aux_hidden_states is not None and getattr(processor, "dflash_append_final", False):
        if isinstance(aux_hidden_states, Tensor):
            aux_hidden_states = torch.cat([aux_hidden_states, hidden_states], dim=-1)
        else:
            aux_hidden_states = [*aux_hidden_states, hidden_states]
    return original(
        processor,
        input_ids,
        hidden_states,
        lm_head,
        logits_metadata,
        aux_hidden_states,
        *args,
        **kwargs,
    )
