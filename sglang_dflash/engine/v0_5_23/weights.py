"""New weights for the draft by SGLang's own selector of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dflash.trainer.new_weights import Answer, NewWeights


class DraftRunner:
    """What SGLang asks of a model's runner when it updates weights, for the draft.

    SGLang's own updater would load a part of a draft, too, and in place of what is derived from it.
    """

    def __init__(self, runner: Any, new_weights: NewWeights) -> None:
        """runner: SGLang's, of the draft."""
        self._runner = runner
        self._new_weights = new_weights
        self.weight_updater = self
        self.check_weights = runner.check_weights

    def begin_weight_update(self) -> None:
        """Nothing is packed."""

    def end_weight_update(self, *, run_post_load: bool) -> None:
        """Nothing is packed."""

    def update_weights_from_tensor(self, named_tensors: Any, load_format: str | None) -> Answer:
        if load_format not in (None, "flattened_bucket"):
            return False, f"load_format {load_format} cannot check a draft. Leave it out."
        update = self._runner.weight_updater.update_weights_from_tensor
        return self._load(update, named_tensors, load_format)

    def load_weights_from_distributed(self, named_tensors: Any) -> Answer:
        return self._load(self._runner.weight_updater.load_weights_from_distributed, named_tensors)

    def _load(self, update: Callable[..., Answer], *args: Any) -> Answer:
        return self._new_weights.out_of(self._runner.model, "", update, *args)


def select_runners(original: Callable[..., Any], updater: Any, selector: str = "all") -> Any:
    """AROUND `SchedulerWeightUpdaterManager._select_runners`: the draft's, if only it is wanted.

    `all`, which is SGLang's default, is the target: the two have no tensor in common.
    """
    if selector != "draft":
        return original(updater, selector)
    runner = updater.draft_worker.draft_model_runner
    return [("draft", DraftRunner(runner, updater.tp_worker.dflash_new_weights))]
