"""Functions that are hooked into SGLang 0.5.23. `hook_table.py` names them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.mem_cache.allocation_sizing import (
    get_alloc_page_size,
    get_alloc_reserve_per_decode,
)
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    get_server_return_hidden_states_mode,
)
from sglang.srt.speculative.dflash_utils import DFlashDraftConfig
from torch import Tensor

from sglang_dflash.checkpoint import load_config
from sglang_dflash.engine import hooks
from sglang_dflash.engine.capture import capture
from sglang_dflash.engine.refusals import longest_request
from sglang_dflash.logits.grammar import mask_by_grammar
from sglang_dflash.model.target_parts import language_model
from sglang_dflash.seam import release
from sglang_dflash.seam.patched import temporarily
from sglang_dflash.seam.resolving import Arguments
from sglang_dflash.settings.options import flags_of


def keep_flags(original: Callable[..., Any], cls: type, namespace: argparse.Namespace) -> Any:
    """AROUND `ServerArgs.from_cli_args`: the arguments are resolved later, and by pickle."""
    server_args = original(cls, namespace)
    server_args.dflash_flags = flags_of(namespace)
    return server_args


def validate_request(_: Any, req: Any, enable_overlap: bool) -> str | None:
    """AROUND `validate_dflash_request`: why a request cannot be served exactly, or None."""
    if req.return_sampling_mask:
        return "return_sampling_mask is not served with DFLASH. Leave it out."
    if req.token_indices_to_pool is not None:
        return "score_extraction_token is not served with DFLASH. Leave it out."
    return hooks.validate_request(req)


def parse_draft_config(original: Callable[..., Any], *, draft_hf_config: Any) -> Any:
    """AROUND `parse_dflash_draft_config`: this package's reading, in SGLang's class.

    The worker's heads are off, because the draft's forward has the head of its family.
    """
    path = getattr(draft_hf_config, "dflash_path", None)
    if path is None:
        return original(draft_hf_config=draft_hf_config)
    config = load_config(path)
    return DFlashDraftConfig(
        num_hidden_layers=config.num_layers,
        num_target_layers=config.num_target_layers,
        block_size=config.draft_width,
        target_layer_ids=list(config.target_layer_ids),
        mask_token="mask",  # by its id, whatever the name
        mask_token_id=config.mask_token_id,
        conv_kernel_size=0,
        conv_group_size=0,
        selector_rank=0,
        selector_top_k=0,
        output_multiplier=1.0,
        final_logit_softcapping=None,
        projector_type=None,
        shift_label=None,
        pure_draft_prefix_len=None,
        gru_hidden_dim=None,
        emb_dim=None,
    )


def capture_layers(
    original: Callable[..., None],
    *,
    model: Any,
    dflash_use_aux_hidden_state: bool,
    dflash_target_layer_ids: list[int],
    **others: Any,
) -> None:
    """AROUND `configure_aux_hidden_state_capture`: capture the last layer, too."""
    if not dflash_use_aux_hidden_state:
        original(
            model=model,
            dflash_use_aux_hidden_state=False,
            dflash_target_layer_ids=dflash_target_layer_ids,
            **others,
        )
        return
    arguments = Arguments(release.server_args())
    layers = arguments.get_model_config().hf_text_config.num_hidden_layers
    returned = get_server_return_hidden_states_mode() != CaptureHiddenMode.NULL
    final_too = returned or arguments.dflash.features is not None
    capture(model, dflash_target_layer_ids, layers, final_too)
    _add_residuals(language_model(model), dflash_target_layer_ids)


def _add_residuals(model: Any, layer_ids: list[int]) -> None:
    """Let target layers of Gemma 3 return their whole output, which SGLang captures.

    They return it in two parts, to be added by the next layer's norm. SGLang captures the first.
    """
    if type(model).__name__ == "Gemma3ForCausalLM":
        for layer_id in layer_ids:
            if layer_id < len(model.model.layers) - 1:
                model.model.layers[layer_id].register_forward_hook(_whole_output)


def _whole_output(layer: Any, _: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, None]:
    hidden, residual = output
    return hidden + residual, None


def no_adjustments(original: Callable[..., None], **given: Any) -> None:
    """AROUND `apply_dflash_verify_logits_adjustments`: `DFlashWorker` applies all rules at once.

    SGLang's function knows no penalties, and calls custom processors for drafts they cannot see.
    """


@dataclass(frozen=True)
class GrammarMasks:
    """The masks of a block's grammars, in the place of SGLang's `GrammarMask`."""

    reqs: list[Any]
    info: Any
    tokens: list[list[int]]

    def apply(self, logits: Tensor) -> None:
        """Ban in place what is forbidden at each position. logits: [B * N, V]."""
        mask_by_grammar(logits, self.reqs, self.info, self.tokens)


def masks_of_any_grammar(
    _: Any, *, reqs: list[Any], tree: Any, sampling_info: Any, barrier: Any, **__: Any
) -> GrammarMasks:
    """AROUND `build_grammar_vocab_mask`, whose masks are of grammars that can go back over drafts.

    barrier: gives the grammars the tokens of the step before.
    """
    if barrier is not None:
        barrier()
    sampling_info.grammar_mask = None  # of the prefill
    *_, tokens = tree.resolve()
    return GrammarMasks(reqs, sampling_info, tokens.tolist())


def processed_alone(original: Callable[[Any], bool], batch: Any) -> bool:
    """AROUND `ScheduleBatch.grammar_needs_sync`: so does a batch with custom logit processors.

    They are code of a user that reads its request, so all output must have come to it.
    """
    info = batch.sampling_info
    custom = info is not None and info.has_custom_logit_processor
    return custom or original(batch)


def bound_requests(info: tuple[Any, ...], worker: Any) -> tuple[Any, ...]:
    """AFTER `TpModelWorker.get_worker_info`: the slots of two blocks fit after the longest request.

    SGLang reserves them, and would let a longer request wait for ever.
    """
    tokens, *others = info
    options = worker.server_args.dflash
    room = longest_request(tokens, options.reserved_tokens, worker.model_runner.page_size)
    longest = min(others[3], room)
    return (tokens, *others[:3], longest, min(others[4], longest - 5), *others[5:])


def rows_for_two_blocks(extra: int) -> int:
    """AFTER `get_req_to_token_extra_context_len`: a row holds all slots that a step reserves.

    SGLang makes rows as wide for larger pages only. Near the end of the context, it then writes
    slots of a request into the row of the next one.
    """
    reserved: int = get_alloc_reserve_per_decode() + get_alloc_page_size() - 1
    return max(extra, reserved)


def room_for_two_blocks(original: Callable[..., Any], *, model_runner: Any, **given: Any) -> Any:
    """AROUND `_build_full_attention_backend_from_str`: blocks may end after the context.

    FA3's page tables are as wide as the context length, and have no pages for positions after it.
    """
    config = model_runner.model_config
    longest = config.context_len + get_alloc_reserve_per_decode()
    with temporarily(config, context_len=longest):
        return original(model_runner=model_runner, **given)
