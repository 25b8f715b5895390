"""What a worker says of itself: in the log, in `/server_info`, and by counts of its steps."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import ServerArgs

from sglang_dflash import __version__
from sglang_dflash.report.metrics import (
    LowAcceptance,
    MeanWidth,
    StepMetrics,
)
from sglang_dflash.settings.options import Options
from sglang_dflash.step.clock import StepClock
from sglang_dflash.step.policies import StepObserver

logger = logging.getLogger(__name__)

PARTS = ("draft", "verify", "commit")  # of a step, that are timed


class Report:
    """The reports of one rank."""

    def __init__(
        self,
        server_args: ServerArgs,
        draft: ModelRunner,
        options: Options,
        clock: StepClock | None,
        dp_rank: int | None,
    ) -> None:
        """clock: None if nothing is timed; dp_rank: a number if there are several replicas."""
        self._server_args = server_args
        self._draft = draft
        self._options = options
        self._clock = clock
        self._dp_rank = dp_rank
        self._mean_width = MeanWidth()
        self.low_acceptance = LowAcceptance(options.block_size)
        self.observers: list[StepObserver] = [self._mean_width]

    def begin(self) -> None:
        """Log how the draft is served, and watch its acceptance. One rank does this."""
        self.observers.append(self.low_acceptance)
        family = self._draft.model.dflash.family.name
        if family == "DFlash 2" and self._draft.dtype == torch.float16:
            logger.warning(
                "DFLASH: a DFlash 2 draft can overflow in float16, and then few drafts are "
                "accepted. Give --dtype bfloat16."
            )
        described = self.description()
        version = described.pop("version")
        fields = " ".join(f"{name}={value}" for name, value in described.items())
        logger.info("sglang-dflash %s: %s", version, fields)

    def take_mean_width(self) -> float:
        return self._mean_width.take()

    def count_steps(self, labels: dict[str, Any]) -> None:
        parts = () if self._clock is None else PARTS
        metrics = StepMetrics(self._options.block_size, labels, parts)
        self.observers.append(metrics)
        if self._clock is not None:
            for part, histogram in metrics.seconds.items():
                self._clock.observe[part] = histogram.observe

    def description(self) -> dict[str, Any]:
        args, draft, options = self._server_args, self._draft.model.dflash, self._options
        described = {
            "version": __version__,
            "draft": args.speculative_draft_model_path,
            "family": draft.family.name,
            "format": draft.format,
            "block_size": options.block_size,
            "verify_width": options.shown_width,
            "draft_ahead": "on" if options.draft_ahead else "off",
            "layers": draft.num_layers,
            "target_layer_ids": list(draft.target_layer_ids),
            "target_attention": "/".join(sorted(set(args.get_attention_backends()))),
            "draft_attention": args.speculative_draft_attention_backend,
            "tp": args.tp_size,
        }
        if self._dp_rank is not None:
            described["dp_rank"] = self._dp_rank
        return described
