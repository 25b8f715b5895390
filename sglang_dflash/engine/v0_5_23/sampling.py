"""What SGLang samples itself, after a prefill, with the rules and draws of this package."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from torch import Tensor

from sglang_dflash.logits.processors import run_custom_processors
from sglang_dflash.logits.rules import NEUTRAL, RequestedRules
from sglang_dflash.step.noise import has_filter
from sglang_dflash.step.sample import SamplingInput, TargetSampler, draw_seeded


def penalised(reqs: list[Req]) -> bool:
    """Whether any request has a penalty or a least length."""
    for req in reqs:
        params = req.sampling_params
        if params.min_new_tokens > 0:
            return True
        if any(getattr(params, name) != neutral for name, neutral in NEUTRAL.items()):
            return True
    return False


class OwnPenalties:
    """Stands in for SGLang's orchestrator of penalties, which knows no output before a prefill."""

    is_required = True

    def __init__(self, rules: RequestedRules, asked: SamplingInput) -> None:
        self._rules = rules
        self._asked = asked

    def apply(self, logits: Tensor) -> None:
        """Penalise in place. logits: [B, V]."""
        self._rules.penalise(logits[:, None], self._asked)


class FirstTokenSampler(Sampler):
    """Draws each request's token by its own parameters and noise, whatever its neighbours'.

    SGLang's own indexes the noise of a whole batch in one way. An error of a custom processor ends
    its scheduler; here it ends the request.
    """

    asked: SamplingInput  # of the prefill whose first tokens are drawn

    def __init__(self, sampler: TargetSampler) -> None:
        super().__init__()
        self._sampler = sampler

    def _preprocess_logits(self, logits: Tensor, info: SamplingBatchInfo) -> Tensor:
        if info.has_custom_logit_processor:
            run_custom_processors(logits, info, self.asked.reqs)
        plain = replace(info, has_custom_logit_processor=False)
        checked: Tensor = super()._preprocess_logits(logits, plain)
        return checked

    def _sample_from_probs(
        self, probs: Tensor, info: SamplingBatchInfo, positions: Tensor, *args: Any
    ) -> tuple[Tensor, Any]:
        if info.sampling_seed is None:
            ones = torch.ones_like(info.temperatures)
            return self._sampler.draw(probs.log(), self.asked, positions, ones), None
        filtered = torch.tensor([has_filter(req.sampling_params) for req in self.asked.reqs])
        return draw_seeded(probs, info, positions, filtered), None
