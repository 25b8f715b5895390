"""Functions that are hooked into SGLang 0.5.13.post1. `hook_table.py` names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_dflash.checkpoint import load_config
from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.checkpoint.served import draft_config
from sglang_dflash.engine.capture import capture
from sglang_dflash.model.target_parts import logits_processor
from sglang_dflash.seam.flags import attention_tp_size
from sglang_dflash.settings.platforms import platform_of


class CaptureConfig:
    """The methods that `ModelRunner` calls on the result of `parse_dflash_draft_config`."""

    def __init__(self, config: DFlashConfig) -> None:
        self.num_target_layers = config.num_target_layers
        self._layers, self._ids = config.num_layers, list(config.target_layer_ids)

    def require_num_layers(self) -> int:
        return self._layers

    def resolve_target_layer_ids(self, **_: Any) -> list[int]:
        return self._ids


def parse_draft_config(*, draft_hf_config: Any) -> CaptureConfig:
    """REPLACE `parse_dflash_draft_config`."""
    return CaptureConfig(load_config(draft_hf_config.dflash_path))


def capture_layers(original: Callable[..., None], runner: Any) -> None:
    """AROUND `ModelRunner.init_aux_hidden_state_capture`: capture the last layer, too."""
    if not runner.dflash_use_aux_hidden_state:
        return original(runner)
    layers = runner.model_config.hf_text_config.num_hidden_layers
    logits_processor(runner.model).dflash_target = True
    args = runner.server_args
    final_too = args.enable_return_hidden_states or args.dflash.features is not None
    capture(runner.model, runner.dflash_target_layer_ids, layers, final_too)
    return None


def logits_of_a_verify(original: Any, processor: Any, logits: Any, metadata: Any) -> Any:
    """AROUND `LogitsProcessor._copy_logits_to_buffer`: a verify's logits keep the LM head's dtype.

    A greedy batch needs only their argmax, and a float32 copy does not change it. A soft cap may
    change it, because SGLang computes the cap in float32. The logits are stored in the place of the
    float32 copy, in memory that all graphs share.
    """
    dflash = getattr(processor, "dflash_target", False)
    if not (dflash and metadata.forward_mode.is_target_verify()):
        return original(processor, logits, metadata)
    if logits.dtype == torch.float32 or processor.final_logit_softcapping:
        return original(processor, logits, metadata)
    logits = logits[:, : processor.vocab_size]
    buffer = metadata.next_token_logits_buffer
    if buffer is None:
        return logits
    room = buffer.flatten().view(logits.dtype)[: logits.numel()]
    return room.view(logits.shape).copy_(logits)


def token_ids_logprobs(
    original: Any, logprobs: Any, token_ids_logprobs_list: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND `get_token_ids_logprobs_raw`: requests that name no tokens get empty tensors.

    For them, SGLang itself returns a list where it expects a tensor, or raises. So a batch that
    mixes such requests crashes its scheduler.
    """
    named = [ids or [] for ids in token_ids_logprobs_list]
    return original(logprobs, named, *args, **kwargs)


def admit_again(scheduler: Any, *_: Any, **__: Any) -> None:
    """BEFORE `Scheduler._get_new_batch_prefill_raw`: a batch without requests is not full.

    Only a request that leaves the running batch opens it again, and an empty one has none. So
    SGLang would never admit the requests that wait. Newer releases do the same there.
    """
    if scheduler.running_batch.is_empty():
        scheduler.running_batch.batch_is_full = False


def tokens_for_next_decode(original: Any, batch: Any, selected_indices: Any = None) -> int:
    """AROUND `ScheduleBatch.new_tokens_required_next_decode`: as many as `Slots.reserve` takes.

    SGLang counts a whole block per request, although a request keeps its slots between steps.
    """
    reqs = batch.reqs if selected_indices is None else [batch.reqs[i] for i in selected_indices]
    return int(batch.req_to_token_pool.dflash_slots.needed(reqs))


def before_new_weights(updater: Any, request: Any) -> None:
    """BEFORE `SchedulerWeightUpdaterManager.update_weights_from_disk`."""
    updater.draft_worker.before_new_weights()


def cell_size(result: int, configurator: Any, runner: Any, num_layers: int) -> int:
    """AFTER `_compute_cell_size`: a token takes KV of the target and KV of the draft."""
    return result + _draft_bytes_per_token(runner)


def windowed_cell_size(_: None, configurator: Any, runner: Any) -> None:
    """AFTER `HybridSWAPoolConfigurator.__init__`: the same for targets with two KV pools.

    The draft's slots have the numbers of the larger pool, whose size is the number of tokens.
    """
    configurator._cell_size += _draft_bytes_per_token(runner)


def _draft_bytes_per_token(runner: Any) -> int:
    """Bytes of draft KV that a token takes on each rank. It has the model's dtype, whatever the
    target's KV has.
    """
    if runner.is_draft_worker:
        return 0
    draft = draft_config(runner.server_args)
    heads: int = max(1, draft.num_kv_heads // attention_tp_size(runner.server_args))
    return draft.kv_bytes_per_token(runner.dtype.itemsize) * heads // draft.num_kv_heads


def room_for_a_block(backend: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER `ModelRunner._get_attention_backend_from_str`: a block may end after the context.

    FA3's page tables are as wide as the context length, and have no pages for positions after it.
    The attention of a hybrid target is inside its backend.
    """
    if platform_of(runner.server_args).bounded_tables:
        attention = getattr(backend, "full_attn_backend", backend)
        attention.max_context_len += runner.server_args.speculative_num_draft_tokens


def cell_size_is_counted(*, target_cell_size_per_token: int, **_: Any) -> int:
    """REPLACE `scale_kv_cell_size_per_token_for_dflash`: `cell_size` already counts the draft."""
    return target_cell_size_per_token


def verify_without_mask(attn_backend: Any) -> tuple[str, bool]:
    """REPLACE `resolve_dflash_verify_mask_policy`: the backends verify a chain causally."""
    return type(attn_backend).__name__, False


def without_plan(_: Any, forward_batch: ForwardBatch, *__: Any, **___: Any) -> None:
    """BEFORE `ModelRunner.forward_idle`, where backends plan a block as a tree of EAGLE.

    The block has said how many rows of padding there are, and attention layers skip them all.
    """
    forward_batch.spec_info, forward_batch.batch_size = None, 0
