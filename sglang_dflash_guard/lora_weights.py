"""LoRA adapters whose weights cannot be served are refused when they are loaded.

SGLang copies the weights into its buffers when a request first uses them. There its scheduler
crashes, or it cuts off what does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.lora.utils import get_target_module_name

from sglang_dflash.errors import WRONG_WEIGHTS, Refusal
from sglang_dflash.seam.patched import temporarily

BUFFERS = (
    *("A_buffer", "B_buffer", "embedding_A_buffer", "embedding_B_buffer"),
    *("lm_head_A_buffer", "lm_head_B_buffer", "new_embeddings_buffer"),
)
FIX = "Load an adapter that was trained for this target."


def load_on_all_ranks(original: Any, worker: Any, request: Any) -> Any:
    """AROUND `BaseTpWorker.load_lora_adapter` and `.load_lora_adapter_from_tensors`.

    SGLang answers what rank 0 says. Here all ranks load an adapter, or none.
    """
    manager, group = worker.model_runner.lora_manager, get_tp_group()
    try:
        result = original(worker, request)
    except WRONG_WEIGHTS as error:  # SGLang catches those of an adapter, and not of reading tensors
        message = f"serialized_tensors cannot be read: {error!r}."
        result = manager.create_lora_update_result(success=False, error_message=message)
    reasons: list[str | None] = [None] * group.world_size
    reason = None if result.success else result.error_message
    torch.distributed.all_gather_object(reasons, reason, group=group.cpu_group)
    for why in reasons:
        if why is not None and result.success:
            manager.unload_lora_adapter(request.to_ref())
            return manager.create_lora_update_result(success=False, error_message=why)
    return result


def check_weights(_: None, manager: Any, ref: Any, *__: Any) -> None:
    """AFTER `LoRAManager.load_lora_weights` and `.load_lora_weights_from_tensors`.

    SGLang answers with the message of the `Refusal`.
    """
    if hasattr(manager, "memory_pool"):  # else `check_all_weights` follows
        with ExitStack() as failed:
            failed.callback(manager.loras.pop, ref.lora_id)
            _check(manager, ref.lora_id, ref.lora_name)
            failed.pop_all()


def check_all_weights(_: None, manager: Any) -> None:
    """AFTER `LoRAManager.init_memory_pool`: check the adapters that a server starts with."""
    for adapter, ref in manager.lora_refs.items():
        _check(manager, adapter, ref.lora_name)


def _check(manager: Any, adapter: str, name: str) -> None:
    """Raise `Refusal` unless all weights are finite and have the sizes of the target's layers.

    SGLang's own copy then says whether they have the rank of the config. It is made into buffers
    that have shapes and no memory.
    """
    pool, loaded = manager.memory_pool, manager.loras[adapter]
    groups = loaded.embedding_layers, *(layer.weights for layer in loaded.layers)
    if not any(groups):
        raise Refusal(f"The LoRA adapter {name} has no weights for this target.", FIX)
    for weights in groups:
        for tensor, values in weights.items():
            if not torch.isfinite(values.float()).all():  # FP8 has no test of its own
                raise Refusal(f"The LoRA adapter {name} holds NaN or infinity in {tensor}.", FIX)
    shapes = {field: _without_memory(getattr(pool, field)) for field in BUFFERS}
    modules = manager.lora_modules, manager.embed_tokens_module, manager.lm_head_module
    try:
        for layer, layers in zip(loaded.layers, manager.lora_modules, strict=True):
            _compare(layer.weights, layers, pool.target_modules)
        with temporarily(pool, pin_memory_available=False, **shapes):
            pool.load_lora_weight_to_buffer(adapter, 0, loaded, *modules)
    except WRONG_WEIGHTS as error:
        raise Refusal(
            f"The weights of the LoRA adapter {name} do not fit its config and the target: "
            f"{error!r}.",
            FIX,
        ) from error


def _compare(weights: Mapping[str, Any], layers: Mapping[str, Any], names: set[str]) -> None:
    """Raise `ValueError` unless A takes the input of a layer and B gives its output, on all ranks.

    layers: those of the target with adapters, by name. names: those that may have adapters.
    """
    bases = {}
    for name, layer in layers.items():
        if hasattr(layer.base_layer, "input_size"):  # experts have none
            bases[get_target_module_name(name, names)] = layer.base_layer
    for name, weight in weights.items():
        if ".experts." in name:
            continue
        base = bases[get_target_module_name(name, names)]
        outputs = base.output_size
        if hasattr(base, "num_kv_head_replicas"):  # counted once for each rank
            queries, *keys_and_values = base.output_sizes
            outputs = queries + sum(keys_and_values) // base.num_kv_head_replicas
        size, expected = (
            (weight.shape[-1], base.input_size) if "lora_A" in name else (len(weight), outputs)
        )
        if size != expected:
            raise ValueError(f"{name} has {size} in the place of {expected}")


def _without_memory(buffers: dict[str, Any]) -> dict[str, Any]:
    """Buffers by target module: tensors, or lists of tensors with one for each layer."""
    return {
        module: [layer.to("meta") for layer in buffer]
        if isinstance(buffer, list)
        else buffer.to("meta")
        for module, buffer in buffers.items()
    }
