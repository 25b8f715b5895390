"""New weights for the draft while the server runs: every rank takes all of them, or none does.

They are copied into the memory of the old ones, so CUDA graphs stay. Context KV of tokens that a
request has already keeps the old projections. It makes drafts worse and no answer other; flush the
cache to be rid of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch import Tensor, nn

from sglang_dflash.checkpoint.new_weights import RESTART, check_new, read_new
from sglang_dflash.errors import WRONG_WEIGHTS, Refusal
from sglang_dflash.model.context_kv import ContextKV
from sglang_dflash.model.draft import DFlashDraftModel

logger = logging.getLogger(__name__)

DONE = "The draft has the new weights, the target keeps its own."
SEND_AGAIN = "Send them again."

Named = Iterable[tuple[str, Tensor]]
Answer = tuple[bool, str]  # as SGLang passes it on: whether it is done, and what to say


class NewWeights:
    def __init__(self, draft: DFlashDraftModel, context_kv: ContextKV) -> None:
        self._draft = draft
        self._context_kv = context_kv
        self._group = get_tp_group().cpu_group

    def from_folder(self, path: str) -> Answer:
        """Take those of a checkpoint, a folder or the id of a hub, which all ranks read."""
        try:
            self._take(lambda: read_new(path, self._draft.dflash))
        except Refusal as refusal:
            return False, str(refusal)
        return True, DONE

    def out_of(
        self, model: nn.Module, prefix: str, update: Callable[..., Answer], *args: Any
    ) -> Answer:
        """The answer of an update of SGLang's, `update(*args)`, which loads weights into a model.

        Those whose names begin with the prefix are taken out of them for the draft, before the
        model gets the others. If they are refused, the model gets none.
        """
        load: Any = model.load_weights
        arrived = False
        refused: Refusal | None = None

        def divide(weights: Named) -> Any:
            nonlocal arrived, refused
            arrived = True
            named = list(weights)
            drafts = [(n.removeprefix(prefix), t) for n, t in named if n.startswith(prefix)]
            try:
                self._take(lambda: check_new(drafts, self._draft.dflash) if drafts else {})
            except Refusal as refusal:
                refused = refusal
                raise
            others = [(n, t) for n, t in named if not n.startswith(prefix)]
            return load(others) if others or not drafts else None

        model.load_weights = divide  # type: ignore[assignment]
        try:
            answer = update(*args)
        except WRONG_WEIGHTS as error:
            if not arrived:
                self._hear_of(Refusal(f"{type(error).__name__}: {error}.", SEND_AGAIN))
            if refused is None:
                raise
        finally:
            del model.load_weights
        return answer if refused is None else (False, str(refused))

    def _take(self, read: Callable[[], Mapping[str, Tensor]]) -> None:
        """Take the weights that `read` returns, none or all. Raises the `Refusal` of any rank."""
        weights: Mapping[str, Tensor] = {}
        refusal = None
        try:
            weights = read()
            if weights:
                self._check_place(weights)
        except Refusal as own:
            refusal = own
        except WRONG_WEIGHTS as error:
            why = f"The new weights cannot be read ({type(error).__name__}: {error})."
            refusal = Refusal(why, SEND_AGAIN)
        self._hear_of(refusal)
        if weights:
            if next(self._draft.parameters()).is_cuda:
                torch.cuda.synchronize()  # a forward on another stream may read the old ones
            self._draft.reload(weights)
            self._context_kv.read_weights()
            logger.info("The draft has new weights.")

    def _check_place(self, weights: Mapping[str, Tensor]) -> None:
        """Raise `Refusal` if the served draft cannot take weights as a checkpoint has them."""
        methods = [getattr(each, "quant_method", None) for each in self._draft.layers.modules()]
        plain = all(isinstance(method, UnquantizedLinearMethod | None) for method in methods)
        packed = (getattr(each, "use_intel_amx_backend", False) for each in self._draft.modules())
        if not plain or any(packed):
            raise Refusal("The weights of the served draft are quantised or packed.", RESTART)
        shared = self._draft.unshared(weights)
        if shared is not None:
            raise Refusal(
                f"The served draft had the target's {shared} when it started, so it shares the "
                "target's. The new weights have others.",
                RESTART,
            )

    def _hear_of(self, refusal: Refusal | None) -> None:
        """Raise the first refusal of any rank. Every rank calls this once in an update."""
        said: list[Refusal | None] = [None] * torch.distributed.get_world_size(self._group)
        torch.distributed.all_gather_object(said, refusal, group=self._group)
        for each in said:
            if each is not None:
                raise each
