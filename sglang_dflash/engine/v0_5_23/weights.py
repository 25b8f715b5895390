"""New weights for the draft by SGLang's own selector of models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sglang_dflash.errors import WRONG_WEIGHTS
from sglang_dflash.trainer.new_weights import Answer, NewWeights


class DraftRunner:
    """What SGLang asks of a model's runner when it updates weights, for the draft.

    SGLang's own updater of the draft takes the tensors apart, and loads nothing.
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

    def update_weights_from_tensor(self, **given: Any) -> Answer:
        return self._load(partial(self._runner.weight_updater.update_weights_from_tensor, **given))

    def load_weights_from_distributed(self, weights: Any) -> Answer:
        update = self._runner.weight_updater.load_weights_from_distributed
        return self._load(partial(update, weights))

    def _load(self, update: Callable[[], Answer]) -> Answer:
        return self._new_weights.out_of(self._runner.model, True, update)


class Unreadable:
    """Tensors that this rank cannot read. The others would wait for it if it said so at once."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __iter__(self) -> Any:
        raise self._error

    def __getitem__(self, _: Any) -> Any:
        raise self._error


def read_own(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND what gives this rank its tensors: an error comes where they are loaded."""
    try:
        return original(*args, **kwargs)
    except WRONG_WEIGHTS as error:
        return Unreadable(error)


def select_runners(original: Callable[..., Any], updater: Any, selector: str = "all") -> Any:
    """AROUND `SchedulerWeightUpdaterManager._select_runners`: the draft's, if only it is wanted.

    `all`, which is SGLang's default, is the target: a draft's tensors are not among its own.
    """
    if selector != "draft":
        return original(updater, selector)
    new_weights = updater.tp_worker.model_runner.dflash_new_weights
    return [("draft", DraftRunner(updater.draft_worker.draft_model_runner, new_weights))]
