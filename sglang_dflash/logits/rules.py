"""Rules that change the target's logits: penalties, grammars, logit bias, custom processors."""

from __future__ import annotations

import torch
from sglang.srt.managers.schedule_batch import Req
from torch import Tensor

from sglang_dflash.logits.grammar import follows_drafts, has_mask, mask_by_grammar
from sglang_dflash.logits.output_counts import OutputCounts
from sglang_dflash.logits.penalties import Bans, Penalties
from sglang_dflash.logits.processors import run_custom_processors
from sglang_dflash.step.copies import to_device
from sglang_dflash.step.sample import SamplingInput

NEUTRAL = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}


class RequestedRules:
    """The rules that the requests of a batch ask for."""

    def __init__(self, all_ends: bool = False) -> None:
        """all_ends: a least length also forbids the end tokens of the model's configuration."""
        self._counts = OutputCounts()
        self._all_ends = all_ends

    def in_use(self, asked: SamplingInput) -> bool:
        return bool(
            asked.penalised
            or _has_masks(asked)
            or asked.info.has_custom_logit_processor
            or asked.info.logit_bias is not None
        )

    def apply(self, logits: Tensor, asked: SamplingInput) -> None:
        block = asked.block
        spread = logits[:, None] if block is None else block.unflatten(logits)  # [B, w, V]
        if asked.penalised:
            self.penalise(spread, asked)
        if _has_masks(asked):
            tokens = [[0]] * len(asked.reqs) if block is None else block.token_ids.tolist()
            mask_by_grammar(spread.flatten(0, 1), asked.reqs, asked.info, tokens)
        if asked.info.logit_bias is not None:
            spread.add_(asked.info.logit_bias[:, None])
        if asked.info.has_custom_logit_processor:
            run_custom_processors(spread[:, 0], asked.info, asked.reqs)
        if block is not None and block.ragged is not None:
            logits.copy_(block.flatten(spread))  # `unflatten` made a copy

    def one_token_a_step(self, asked: SamplingInput) -> list[bool]:
        """Those with a custom processor, and those whose grammar cannot follow drafts.

        A processor is user code that reads the request, so it runs only on the anchor's logits.
        Such a grammar masks only the anchor's logits.
        """
        custom = asked.info.has_custom_logit_processor
        alone: list[bool] = []
        if not custom and not asked.has_grammar:
            return alone
        for req in asked.reqs:
            has_processor = custom and req.custom_logit_processor is not None
            alone.append(has_processor or not follows_drafts(req))
        return alone

    def penalise(self, logits: Tensor, asked: SamplingInput) -> None:
        """Penalties and least lengths alone, in place. logits: [B, w, V]."""
        counts = self._counts.of(asked, logits.shape[-1])
        values = {
            kind: [getattr(req.sampling_params, kind) for req in asked.reqs] for kind in NEUTRAL
        }
        on_device = to_device(list(values.values()), logits.device, torch.float32)  # [3, B]
        kinds = [
            tensor[:, None] if any(value != NEUTRAL[kind] for value in values[kind]) else None
            for kind, tensor in zip(NEUTRAL, on_device, strict=True)
        ]
        tokens = None if asked.block is None else asked.block.token_ids
        Penalties(counts, *kinds).apply(logits, tokens)
        bans = self._early_stops(asked, logits)
        if bans is not None:
            bans.apply(logits)

    def _early_stops(self, asked: SamplingInput, logits: Tensor) -> Bans | None:
        """The stop tokens of requests whose output is still too short, if there are any."""
        rows: list[tuple[int, int, int]] = []
        for i, req in enumerate(asked.reqs):
            length = self._counts.length(req) + (asked.block is not None)  # with the anchor
            positions = req.sampling_params.min_new_tokens - length
            if positions > 0:
                rows.extend((i, token, positions) for token in self._stop_tokens(req))
        if not rows:
            return None
        return Bans(*to_device(list(zip(*rows, strict=True)), logits.device))

    def _stop_tokens(self, req: Req) -> set[int]:
        """The tokens that end a request, as SGLang's `BatchedMinNewTokensPenalizer` has them."""
        tokenizer = req.tokenizer
        own = req.sampling_params.stop_token_ids or set()
        more = tokenizer.additional_stop_token_ids or set()
        ends = (req.eos_token_ids or set()) if self._all_ends else set()
        return {*own, *more, *ends, tokenizer.eos_token_id} - {None}


def _has_masks(asked: SamplingInput) -> bool:
    return asked.has_grammar and any(map(has_mask, asked.reqs))
