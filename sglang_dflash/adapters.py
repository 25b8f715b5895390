"""LoRA adapters on the target, and their hooks. The draft does not know them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch

from sglang_dflash.algorithm import is_dflash, serves_dflash
from sglang_dflash.errors import WRONG_WEIGHTS, Refusal
from sglang_dflash.temporary import temporarily

CHUNK = 16  # tokens of a segment in csgmv, at least
BUFFERS = (
    *("A_buffer", "B_buffer", "embedding_A_buffer", "embedding_B_buffer"),
    *("lm_head_A_buffer", "lm_head_B_buffer", "new_embeddings_buffer"),
)
ANOTHER_ADAPTER = "Load an adapter that was trained for this target."


def has_adapters(server_args: Any) -> bool:
    """Whether a server with these arguments loads adapters, now or later.

    SGLang lets --lora-paths alone turn --enable-lora on, but only after all other arguments.
    """
    enabled: bool | None = server_args.enable_lora
    return bool(server_args.lora_paths) if enabled is None else enabled


def check_adapters(original: Callable[..., None], server_args: Any) -> None:
    """AROUND `ServerArgs.check_lora_server_args`, which refuses adapters with DFLASH."""
    if not is_dflash(server_args):
        return original(server_args)
    with temporarily(server_args, speculative_algorithm=None):
        return original(server_args)


def load_from_tensors(original: Any, worker: Any, request: Any) -> Any:
    """AROUND `BaseTpWorker.load_lora_adapter_from_tensors`: answer in any case.

    SGLang catches the errors of an adapter, and not those of reading its tensors.
    """
    if not serves_dflash():
        return original(worker, request)
    try:
        return original(worker, request)
    except WRONG_WEIGHTS as error:
        return worker.model_runner.lora_manager.create_lora_update_result(
            success=False, error_message=f"serialized_tensors cannot be read: {error!r}."
        )


def check_weights(_: None, manager: Any, ref: Any, *__: Any) -> None:
    """AFTER `LoRAManager.load_lora_weights` and `.load_lora_weights_from_tensors`.

    Refuse an adapter whose weights are not finite, or do not fit its config and the target.
    SGLang's scheduler crashes when a request uses it. SGLang answers with this `Refusal`.
    """
    if hasattr(manager, "memory_pool") and serves_dflash():  # else `check_all_weights` follows
        try:
            _check(manager, ref.lora_id, ref.lora_name)
        except Refusal:
            del manager.loras[ref.lora_id]
            raise


def check_all_weights(_: None, manager: Any) -> None:
    """AFTER `LoRAManager.init_memory_pool`: check the adapters that a server starts with."""
    if serves_dflash():
        for adapter, ref in manager.lora_refs.items():
            _check(manager, adapter, ref.lora_name)


def _check(manager: Any, adapter: str, name: str) -> None:
    """Raise `Refusal` unless SGLang can copy the weights into its buffers.

    The copy is made into buffers that have shapes and no memory.
    """
    pool, loaded = manager.memory_pool, manager.loras[adapter]
    groups = loaded.embedding_layers, *(layer.weights for layer in loaded.layers)
    if not any(groups):
        raise Refusal(f"The LoRA adapter {name} has no weights for this target.", ANOTHER_ADAPTER)
    for weights in groups:
        for tensor, values in weights.items():
            if not torch.isfinite(values).all():
                raise Refusal(
                    f"The LoRA adapter {name} holds NaN or infinity in {tensor}.", ANOTHER_ADAPTER
                )
    shapes = {field: _without_memory(getattr(pool, field)) for field in BUFFERS}
    modules = manager.lora_modules, manager.embed_tokens_module, manager.lm_head_module
    try:
        with temporarily(pool, pin_memory_available=False, **shapes):
            pool.load_lora_weight_to_buffer(adapter, 0, loaded, *modules)
    except WRONG_WEIGHTS as error:
        raise Refusal(
            f"The weights of the LoRA adapter {name} do not fit its config and the target: "
            f"{error!r}.",
            ANOTHER_ADAPTER,
        ) from error


def _without_memory(buffers: dict[str, Any]) -> dict[str, Any]:
    """Buffers by target module: tensors, or lists of tensors with one for each layer."""
    return {
        module: [layer.to("meta") for layer in buffer]
        if isinstance(buffer, list)
        else buffer.to("meta")
        for module, buffer in buffers.items()
    }


def with_lengths(original: Callable[..., None], manager: Any, batch: Any) -> None:
    """AROUND `LoRAManager.prepare_lora_batch`: the lengths of a verify, where backends read them.

    They take a verify for a prefill, and a prefill's lengths are None in its batch.
    """
    if batch.forward_mode.is_target_verify() and batch.spec_algorithm.is_dflash():
        requests, width = batch.batch_size, batch.spec_info.draft_token_num
        batch = copy.copy(batch)
        batch.extend_num_tokens = requests * width
        batch.extend_seq_lens_cpu = [width] * requests
        lens = torch.full((requests,), width, dtype=torch.int32, device=batch.input_ids.device)
        batch.extend_seq_lens = lens
    original(manager, batch)


def all_segments(_: None, backend: Any, *, forward_batch: Any, **__: Any) -> None:
    """AFTER `ChunkedSgmvLoRABackend.prepare_lora_batch`: graphs run all segments that may occur.

    A segment is up to CHUNK tokens or more of one adapter. SGLang captures graphs without adapters,
    and the number of segments is captured with them. So further segments would not be computed.
    Unused ones are empty here.
    """
    info = backend.batch_info
    if not (info.use_cuda_graph and forward_batch.spec_algorithm.is_dflash()):
        return
    info.seg_indptr[info.num_segments + 1 :].fill_(len(forward_batch.input_ids))
    info.weight_indices[info.num_segments :].zero_()
    of_each = math.ceil(forward_batch.spec_info.draft_token_num / CHUNK)
    info.bs = info.num_segments = forward_batch.batch_size * of_each
